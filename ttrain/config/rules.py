"""Rules for `auto`: pretraining by budget and model size, fine-tuning by its rows.

Measured in docs/recipe.md. The batch grows with the token budget as the critical batch size does
(arXiv:2410.21676, power 0.47); the learning rates of embedding and head scale with the width. No
learning rate depends on the batch, so that a run of a given batch can be extended.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

AUTO: Final = "auto"

# Tokens, width and batch at which the defaults were measured.
BUDGET, WIDTH, BATCH = (1_000_000, 128, 2048)
SMALLEST_BATCH = 1024
TOKENS_PER_PARAMETER = (
    2  # estimates a budget given in epochs; low, since too small a batch costs less
)
RATES = {"lr": 4e-3, "muon_lr": 0.02, "embedding_lr": 0.04, "head_lr": 4e-3}
OWN_HEAD_LR = 8e-3  # of a head that is not the embedding
RATES_BY_WIDTH = frozenset({"embedding_lr", "head_lr"})
BETAS = (0.5, 0.95)  # of AdamW next to Muon
USUAL_BETAS = (0.9, 0.95)  # of AdamW alone
# Of the weights; it grows with a budget in passes, less with a teacher
DECAY, DECAY_A_PASS, DECAY_TAUGHT = 0.1, 0.05, 0.03
LARGEST_HEAD = (
    0.25  # of the parameters of the layers; a larger output head is tied to the embedding
)

# Fine-tuning on few rows: the batch shrinks where the usual passes have fewer than FEWEST_STEPS
# steps; passes are added, up to MOST_PASSES, where there are fewer than ENOUGH_STEPS steps. On
# four of five sets of 40 to 100 chats the loss on held-out chats was 0.4 to 1.7 above the best of
# 1 to 15 passes after 20 to 40 steps, at most 0.16 after about 60, and rose again after 100.
FEWEST_STEPS, ENOUGH_STEPS, MOST_PASSES = 20, 60, 10

# Pretraining on little text: `tokens` is USEFUL_PASSES passes over the rows where that is less
# than TOKENS. The loss on held-out documents was the lowest after 4 to 6 passes on eight small
# sets (docs/log.md): of 300 English ones it ended at 4.60, 4.58, 5.25 and 7.20 after 4, 6, 10
# and 17.6 passes.
TOKENS, USEFUL_PASSES = 1_800_000, 5

TIED = "model.tie_embeddings"
BATCH_KEY = "pretrain.tokens_per_step"
OPTIM = "pretrain.optim."
BETAS_KEY = f"{OPTIM}betas"
KEYS = (TIED, BATCH_KEY, BETAS_KEY, f"{OPTIM}weight_decay", *(f"{OPTIM}{name}" for name in RATES))
DEFAULTS_OF_EXISTING = {
    **dict.fromkeys(f"{OPTIM}{name}" for name in sorted(RATES_BY_WIDTH)),
    BETAS_KEY: USUAL_BETAS,
}
SIZES = ("hidden_size", "layers", "heads", "kv_heads", "intermediate_size")
START = "pretrain.start_from"
NEW = "none"


@dataclass(frozen=True)
class Rule:
    """The value of a setting, and the others from which it follows."""

    value: Any
    reason: str


def by_rule(values: Mapping[str, Any]) -> dict[str, Rule]:
    """The rules of `KEYS` for a new model, from all settings by dotted names."""
    sizes = {name: values[f"model.{name}"] for name in SIZES}
    parameters = layer_parameters(sizes)
    width = sizes["hidden_size"]
    share = values["tokenizer.vocab_size"] * width / parameters
    a_pass = DECAY_TAUGHT if values.get("pretrain.teacher") else DECAY_A_PASS
    tokens = TOKENS if values["pretrain.tokens"] == AUTO else values["pretrain.tokens"]
    budget = tokens or TOKENS_PER_PARAMETER * parameters
    tied = share > LARGEST_HEAD if values[TIED] == AUTO else values[TIED]
    kind = values[f"{OPTIM}kind"]
    alone = f"since optim.kind is {kind}"
    rules = {
        TIED: Rule(
            share > LARGEST_HEAD,
            f"a separate head would have {share:.2f} of the {parameters / 1e6:.3g} M parameters "
            f"of the layers, and may have {LARGEST_HEAD} at most",
        ),
        BATCH_KEY: Rule(
            whole_rows(
                max(SMALLEST_BATCH, BATCH * (budget / BUDGET) ** 0.47),
                values["pretrain.row_length"],
            ),
            f"{BATCH} x ({budget / 1e6:.4g} M tokens / 1 M)^0.47, at least {SMALLEST_BATCH}, "
            "a power of two, in whole rows",
        ),
        f"{OPTIM}weight_decay": Rule(
            max(DECAY, round(a_pass * (values["pretrain.epochs"] or 0), 3))
            if kind == "muon"
            else DECAY,
            f"{a_pass} x pretrain.epochs with Muon, at least {DECAY}",
        ),
        BETAS_KEY: Rule(BETAS, "beside Muon") if kind == "muon" else Rule(USUAL_BETAS, alone),
    }
    for name, usual in RATES.items():
        rate = OWN_HEAD_LR if name == "head_lr" and not tied else usual
        rule = Rule(rate, f"{rate:g}, at all sizes")
        if name in RATES_BY_WIDTH:
            scaled = float(f"{rate * math.sqrt(WIDTH / width):.3g}")
            rule = (
                Rule(scaled, f"{rate:g} x ({width} / {WIDTH})^-0.5")
                if kind == "muon"
                else Rule(None, f"as lr, {alone}")
            )
        rules[f"{OPTIM}{name}"] = rule
    return rules


def automatic(values: Mapping[str, Any]) -> dict[str, Any]:
    """Values of `KEYS` for `auto`, from all settings; {} if some are missing."""
    try:
        if values.get(START, NEW) != NEW:
            return {
                **DEFAULTS_OF_EXISTING,
                BATCH_KEY: whole_rows(BATCH, values["pretrain.row_length"]),
            }
        return {key: rule.value for key, rule in by_rule(values).items()}
    except KeyError:
        return {}


def followed(values: Mapping[str, Any]) -> dict[str, Rule]:
    """The rules whose value the settings have; {} if pretraining makes no new model."""
    return (
        {key: rule for key, rule in by_rule(values).items() if rule.value == values[key]}
        if values[START] == NEW
        else {}
    )


@dataclass(frozen=True)
class FineTuning:
    """Batch in tokens and passes of a fine-tuning with enough rows."""

    tokens_per_step: int = 4096
    epochs: float = 1.0

    def batch(self, rows: int, row_length: int) -> int:
        """Tokens of a step: at most `tokens_per_step`, fewer below FEWEST_STEPS steps.

        It does not depend on the passes, so that a run with more passes can continue this one.
        """
        return row_length * min(
            max(1, self.tokens_per_step // row_length),
            max(1, int(rows * self.epochs) // FEWEST_STEPS),
        )

    def passes(self, rows: int, rows_per_step: int) -> float:
        """`epochs`, or the complete passes in ENOUGH_STEPS steps, at most MOST_PASSES."""
        needed = math.ceil(ENOUGH_STEPS * rows_per_step / max(1, rows))
        return self.epochs if needed <= self.epochs else float(min(MOST_PASSES, needed))

    def reasons(self, row_length: int) -> dict[str, str]:
        """The rules in words, by setting."""
        most = max(1, self.tokens_per_step // row_length) * row_length
        return {
            "tokens": f"{TOKENS:,}, less where that is over {USEFUL_PASSES} passes",
            "tokens_per_step": f"{most}, less where that gives under {FEWEST_STEPS} steps, at "
            "least a row",
            "epochs": f"{self.epochs:g}, up to {MOST_PASSES} where that gives under "
            f"{ENOUGH_STEPS} steps",
        }


def budget(tokens_per_pass: float) -> int:
    """Tokens of a pretraining: TOKENS, or USEFUL_PASSES passes if fewer."""
    return min(TOKENS, math.ceil(USEFUL_PASSES * tokens_per_pass))


def layer_parameters(sizes: Mapping[str, Any]) -> int:
    """Parameters of the matrices of all layers of a dense gated model; its `SIZES`."""
    hidden = sizes["hidden_size"]
    inner = sizes["intermediate_size"] or usual_intermediate_size(hidden)
    key_width = hidden // sizes["heads"] * (sizes["kv_heads"] or sizes["heads"])
    return int(sizes["layers"] * hidden * (2 * (hidden + key_width) + 3 * inner))


def usual_intermediate_size(hidden_size: int) -> int:
    """8/3 of the width, to a multiple of 32: as many parameters as 4 x without gate."""
    return -(-(hidden_size * 8 // 3) // 32) * 32


def whole_rows(tokens: float, row_length: int) -> int:
    """The power of two nearest to a number of tokens, in complete rows, at least one."""
    return max(1, round((1 << round(math.log2(tokens))) / row_length)) * row_length
