"""What locations are expanded to, and the commits of a data set on the Hub."""

from ttrain.data import locations

ROW = b'{"text":"a"}\n'
OLD, NEW, CONVERTED = "0" * 39 + "1", "0" * 39 + "2", "c" * 40


def expand(*patterns: str) -> list[str]:
    return locations.expand(patterns, "data.pretrain")
