"""The six stages as Dagster assets in one process; `python dagster_six.py [rerun]`.

Dagster materializes what it is asked to. `rerun` asks for what its declarative automation calls missing: nothing after a run
that completed, and after one that failed what that did not make.
"""

from __future__ import annotations

import sys

import dagster
from step import step


def asset(number: int) -> dagster.AssetsDefinition:
    settings = {
        "name": f"stage_{number}",
        "code_version": "1",
        "automation_condition": dagster.AutomationCondition.missing(),
    }
    if number == 1:

        @dagster.asset(**settings)
        def first() -> int:
            return step(1, 0)

        return first

    @dagster.asset(**settings, ins={"before": dagster.AssetIn(f"stage_{number - 1}")})
    def later(before: int) -> int:
        return step(number, before)

    return later


def main() -> int:
    definitions = dagster.Definitions([asset(number) for number in range(1, 7)])
    with dagster.DagsterInstance.get() as instance:
        wanted = {key.path[-1] for key in definitions.resolve_asset_graph().materializable_asset_keys}
        if sys.argv[1:] == ["rerun"]:
            asked = dagster.evaluate_automation_conditions(definitions, instance)
            wanted = {name for name in wanted if asked.get_num_requested(dagster.AssetKey(name))}
        if not wanted:
            return 0
        chosen = dagster.AssetSelection.assets(*sorted(wanted))
        done = dagster.materialize(definitions.assets, instance=instance, selection=chosen, raise_on_error=False)
        return int(not done.success)


if __name__ == "__main__":
    sys.exit(main())
