"""What a run's page tells of where it came from: lineage, settings, machine and libraries."""

from __future__ import annotations

import json
from collections.abc import Iterator

from ttrain.config import Settings, flatten
from ttrain.core.hashing import digest_of
from ttrain.reports.html import Markup, details, joined, table, tag
from ttrain.tracking import RunView

SHOWN_KEY = 12


def lineage(view: RunView) -> Markup:
    """Each stage: its key, its content, what it was made of, by which code, commit and run."""
    rows = []
    for name, stage in view.stages.items():
        manifest = view.manifest(name)
        if not manifest:
            continue
        used = (f"{one['stage']} {one['key'][:SHOWN_KEY]}" for one in manifest.get("inputs", {}).values())
        read = (
            f"{one['name']} {one['sha256'][:SHOWN_KEY]}"
            for files in manifest["ingredients"].get("files", {}).values()
            for one in files
        )
        made, listed = manifest.get("provenance", {}), [*used, *read]
        shown = ", ".join(listed[:6]) + (f" and {len(listed) - 6} more" if listed[6:] else "")
        code = digest_of(manifest["ingredients"].get("code", {}))[:SHOWN_KEY]
        commit = str(made.get("commit") or "")
        rows.append(
            (
                name,
                _mono((stage.key or "")[:SHOWN_KEY]),
                _mono(shown or "–"),
                _mono(code),
                _mono(commit[:SHOWN_KEY] + ("+" if "+" in commit else "")),
                made.get("run") or stage.made_by or "",
            )
        )
    if not rows:
        return Markup()
    more = tag("p", "In full: ", tag("code", f"ttrain lineage {view.name}"), class_="faint")
    return joined([table(("stage", "key", "made of", "code", "commit", "made by"), rows), more])


def _mono(text: str) -> Markup:
    return tag("td", text, class_="mono")


def settings(view: RunView) -> Iterator[Markup]:
    """Those that differ from the defaults; all of them folded away."""
    if not view.params:
        return
    defaults = {name: str(value) for name, value in flatten(Settings().model_dump(mode="json"))}
    own = [
        (name, value, defaults.get(name, "–")) for name, value in sorted(view.params.items()) if defaults.get(name) != value
    ]
    if own:
        yield table(("set to another value than the default", "value", "default"), own)
    everything = json.dumps(dict(sorted(view.params.items())), indent=1, ensure_ascii=False)
    yield details(f"all {len(view.params)} settings", tag("pre", everything))


def machine(view: RunView) -> Markup:
    """What the artifacts' makers noted, each value once."""
    found: dict[str, list[str]] = {}
    for name in view.stages:
        made = view.manifest(name).get("provenance", {})
        noted = {**{what: made.get(what) for what in ("ttrain", "python", "platform")}, **made.get("libraries", {})}
        for what, value in noted.items():
            if value and str(value) not in found.setdefault(what, []):
                found[what].append(str(value))
        for what in ("device", "precision", "threads", "ranks", "compiled"):
            value = view.manifest(name).get("result", {}).get(what)
            if value is not None and str(value) not in found.setdefault(what, []):
                found[what].append(str(value))
    return (
        table(("what", "value"), [(what, ", ".join(values)) for what, values in found.items() if values])
        if found
        else Markup()
    )
