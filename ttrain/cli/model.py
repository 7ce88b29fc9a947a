"""The `model` commands: their arguments, and what they print."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from ttrain.cli.model_import import EPILOG, import_model
from ttrain.cli.options import AsJson, Files, Profiles, load_settings
from ttrain.core.terminal import escaped, print_json, table

if TYPE_CHECKING:
    from ttrain.cli.model_costs import Cost

SHOWN_KINDS = 6  # in a line

model_app = typer.Typer(
    no_args_is_help=True,
    help="Show what a model of given sizes costs; bring one along.",
    epilog="Example:  ttrain model show 10m",
)
model_app.command("import", epilog=EPILOG)(import_model)


@model_app.command(
    "show",
    epilog="Examples:  ttrain model show\n\nttrain model show 124m model.kv_heads=4\n\n"
    "ttrain model show model.kind=gpt2 model.layers=6 --json\n\nttrain model show --kinds",
)
def show(
    words: Annotated[
        list[str] | None,
        typer.Argument(metavar="[PRESET|KEY=VALUE]...", help="a preset, and settings that win over it", show_default=False),
    ] = None,
    config: Files = None,
    profile: Profiles = None,
    kinds: Annotated[bool, typer.Option("--kinds", help="list every model.kind instead")] = False,
    as_json: AsJson = False,
) -> None:
    """Print parameters, FLOPs and memory of the presets, or of the model of the settings that are given."""
    if kinds:
        _show_kinds(as_json)
        return
    if not (words or config or profile):
        _show_presets(as_json)
        return
    from ttrain.config.model_presets import vocab_size_of
    from ttrain.errors import UsageError

    named = [word for word in words or () if "=" not in word]
    if len(named) > 1:
        raise UsageError(f"these are {len(named)} presets: {', '.join(named)}; give one")
    overrides = [*(f"model.preset={name}" for name in named), *(word for word in words or () if "=" in word)]
    loaded = load_settings(overrides, config, profile)
    preset_vocabulary = bool(named) and "tokenizer.vocab_size" not in loaded.sources
    from ttrain.cli import model_costs

    cost = model_costs.of_settings(loaded.settings, vocab_size=vocab_size_of(named[0]) if preset_vocabulary else None)
    if as_json:
        print_json(cost.to_json())
        return
    _print_cost(cost, "of the preset" if preset_vocabulary else "tokenizer.vocab_size")


def _print_cost(cost: Cost, vocabulary: str) -> None:
    attention = f"6 a weight that multiplies + 12 layers heads head_dim {cost.row_length}, arXiv:2204.02311, appendix B"
    rows: list[tuple[str, str, str]] = [
        ("architecture", cost.kind, "model.kind"),
        ("vocabulary", f"{cost.vocab_size:,}", vocabulary),
        ("parameters", f"{cost.parameters:,}", ""),
        ("  that a token meets", f"{cost.active_parameters:,}", "without the experts that it does not visit"),
        ("  embeddings and head", f"{cost.embedding_parameters:,}", ""),
        *(
            [("second head", f"{cost.second_head_parameters:,}", "model.multi_token; beside the model")]
            if cost.second_head_parameters
            else []
        ),
        ("FLOPs of a token", f"{cost.flops_per_token:.4g}", f"forward and backward: {attention}"),
    ]
    for kind, size in cost.memory_bytes.items():
        rows.append((f"memory with {kind}", _size(size), "weights, gradients and state; activations come on top"))
    rows += [(f"checkpoint with {kind}", _size(size), "weights and state") for kind, size in cost.checkpoint_bytes.items()]
    rows.append(("model on disk", _size(cost.model_bytes), "fp32; `ttrain export` halves it"))
    table(("what", "value", ""), rows)


def _show_presets(as_json: bool) -> None:
    from ttrain.cli import model_costs
    from ttrain.config.model_presets import sizes_of

    costs = model_costs.of_presets()
    if as_json:
        print_json({name: {"settings": sizes_of(name), **cost.to_json()} for name, cost in costs.items()})
        return
    columns = ("hidden_size", "layers", "heads", "kv_heads", "max_length")
    rows = []
    for name, cost in costs.items():
        sizes = sizes_of(name)
        rows.append((
            name, *("" if sizes[column] is None else sizes[column] for column in columns), f"{cost.vocab_size:,}",
            f"{cost.parameters:,}", f"{cost.flops_per_token:.2g}", *map(_size, cost.memory_bytes.values()),
        ))  # fmt: skip
    table(("preset", *columns, "vocabulary", "parameters", "FLOPs/token", "memory adamw", "memory muon"), rows)
    print("take one with model.preset=NAME; what is set beside it wins. More of one: ttrain model show NAME")


def _show_kinds(as_json: bool) -> None:
    from ttrain.model.architecture import suitable_kinds

    found = suitable_kinds()
    if as_json:
        print_json(found)
        return
    for start in range(0, len(found), SHOWN_KINDS):
        print(escaped("  ".join(f"{name:24}" for name in found[start : start + SHOWN_KINDS]).rstrip()))


def _size(size: float) -> str:
    """Bytes as people read them, in powers of a thousand."""
    for unit in ("B", "kB", "MB"):
        if size < 1000:
            return f"{size:.3g} {unit}"
        size /= 1000
    return f"{size:.3g} GB" if size < 1000 else f"{size / 1000:.3g} TB"
