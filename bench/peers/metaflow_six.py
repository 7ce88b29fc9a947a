"""The six stages as a Metaflow flow."""

from __future__ import annotations

from metaflow import FlowSpec, step
from step import step as add


class Six(FlowSpec):
    @step
    def start(self):
        self.value = add(1, 0)
        self.next(self.second)

    @step
    def second(self):
        self.value = add(2, self.value)
        self.next(self.third)

    @step
    def third(self):
        self.value = add(3, self.value)
        self.next(self.fourth)

    @step
    def fourth(self):
        self.value = add(4, self.value)
        self.next(self.fifth)

    @step
    def fifth(self):
        self.value = add(5, self.value)
        self.next(self.end)

    @step
    def end(self):
        self.value = add(6, self.value)
        assert self.value == 6


if __name__ == "__main__":
    Six()
