"""A pass being written, operator by operator."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(slots=True)
class PassDraft:
    """Operators of a pass, their times still to come: ``tasks[i]`` are the numbers of operator i.

    ``waits[i]`` is how many operators it waits for, which come in a row in ``after``. ``synchronised`` is what the
    gradient of each parameter is called in the end, by its node; only in the last micro-batch.
    """

    tasks: list[list[int]] = field(default_factory=list)
    stream: list[int] = field(default_factory=list)
    waits: list[int] = field(default_factory=list)
    after: list[int] = field(default_factory=list)
    ahead: list[bool] = field(default_factory=list)
    output: int = -1
    synchronised: dict[int, str] = field(default_factory=dict)

    @property
    def leading(self) -> int:
        """Tasks at the beginning that wait for no input of the pass."""
        count = 0
        for tasks, ahead in zip(self.tasks, self.ahead, strict=True):
            if tasks and not ahead:
                break
            count += len(tasks)
        return count

    def add(self, tasks: list[int], stream: int, after: list[int], ahead: bool) -> int:
        """Append an operator behind those in ``after``; returns its number."""
        self.tasks.append(tasks)
        self.stream.append(stream)
        self.waits.append(len(after))
        self.after += after
        self.ahead.append(ahead)
        return len(self.tasks) - 1

    def runs_like(self, other: PassDraft) -> bool:
        """Whether two passes run the same in the same order."""
        mine, theirs = ((d.tasks, d.stream, d.waits, d.after, d.ahead, d.output) for d in (self, other))
        return mine == theirs

    def append(self, other: PassDraft, outside: list[int]) -> int:
        """Append operators as `cut` has left them; returns the number of the first of them."""
        start = len(self.tasks)
        self.tasks += other.tasks
        self.stream += other.stream
        self.waits += other.waits
        self.after += [n + start if n >= 0 else outside[~n] for n in other.after]
        self.ahead += other.ahead
        self.synchronised |= other.synchronised
        return start

    def cut(self, start: int, outside: list[int]) -> PassDraft:
        """The operators from `start` on, numbered from zero; those outside before them by ``~place`` in `outside`."""
        place = {n: ~i for i, n in enumerate(outside)}
        begin = sum(self.waits[:start])
        return PassDraft(
            tasks=self.tasks[start:],
            stream=self.stream[start:],
            waits=self.waits[start:],
            after=[n - start if n >= start else place[n] for n in self.after[begin:]],
            ahead=self.ahead[start:],
            synchronised=dict(self.synchronised),
        )
