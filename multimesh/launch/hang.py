"""What the answers of all ranks make of a hang: whether it is one, whose it is, how it reads.

Pure: `stall` asks the ranks, and acts on what this module says.
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

__all__ = ["Answer", "Answers", "find_culprit", "find_cycle", "is_stuck", "may_be_late", "report"]


@dataclass(frozen=True)
class Answer:
    """What a rank says of itself.

    Attributes:
      text: What it does, for people.
      still: For how many seconds it has not moved.
      is_waiting: Whether it is somewhere that may wait for other ranks.
      waits_for: The ranks that it waits for, where that is known.
      stacks: The stacks of its threads, or "".
    """

    text: str
    still: float
    is_waiting: bool
    waits_for: Sequence[int] = ()
    stacks: str = ""


_LONG = 2.0  # seconds: who has not moved for so long is not about to

Answers = Mapping[int, Answer]
"""Answers by rank, of those that answered."""


def is_stuck(before: Answers, now: Answers, size: int, timeout: float) -> bool:
    """Whether a job will not move any more.

    No rank has moved for the timeout, and there is a reason for it: one has twice not answered, or
    waits for others. Ranks that all sleep may have been told to.

    Args:
      before: The answers half a timeout ago.
      now: The answers now.
      size: Number of ranks.
      timeout: Seconds.
    """
    newly_silent = before.keys() - now.keys()
    if newly_silent or any(answer.still < timeout for answer in now.values()):
        return False
    return len(now) < size or any(answer.is_waiting for answer in now.values())


def may_be_late(answered: Collection[int], hosts: Sequence[str]) -> bool:
    """Whether several ranks that do not answer may just be late, as on a busy machine.

    A host all of whose ranks are silent is rather cut off.

    Args:
      answered: The ranks that answered.
      hosts: The host of each rank.
    """
    silent = len(hosts) - len(answered)
    return silent > 1 and silent > len(_cut_off(answered, hosts))


def _cut_off(answered: Collection[int], hosts: Sequence[str]) -> list[int]:
    """The ranks of hosts of which no rank has answered."""
    heard = {hosts[rank] for rank in answered}
    return [rank for rank, host in enumerate(hosts) if host not in heard]


def find_cycle(answers: Answers) -> list[int]:
    """Ranks that wait for one another, each for the next and the last for the first, or []."""
    for start in sorted(answers):
        path = _follow(answers, start)
        if path[-1] in path[:-1]:
            return path[path.index(path[-1]) : -1]
    return []


def find_culprit(answers: Answers, rank: int, hosts: Sequence[str]) -> int | None:
    """The rank that a job hangs because of, as `rank` sees it.

    Args:
      answers: Of the ranks that answered.
      rank: The rank that asked.
      hosts: The host of each rank.

    Returns:
      The only rank that does not answer, or else the one that `rank` waits for in the end. Where
      it is not known whom that waits for, the first rank of a host that is cut off. None if that
      is a cycle, or `rank` waits for none.
    """
    silent = [each for each in range(len(hosts)) if each not in answers]
    if 0 in silent:
        return 0  # without it, the others cannot answer
    if len(silent) == 1:
        return silent[0]
    path = _follow(answers, rank)
    if len(path) > 1:
        return path[-1] if path[-1] not in path[:-1] else None
    return next(iter(_cut_off(answers, hosts)), None)


def _follow(answers: Answers, rank: int) -> list[int]:
    """From a rank to one that it waits for, and so on, to one that waits for none or comes again.

    Of several ranks that one waits for, one that waits for none itself is the reason: rather one
    that says so and does not move than one of several that do not answer, and may be late.
    """

    def seems_late(rank: int) -> bool:
        return rank not in answers or answers[rank].still < _LONG

    path = [rank]
    while path[-1] in answers and path[-1] not in path[:-1]:
        waits_for = answers[path[-1]].waits_for
        free = [r for r in waits_for if r not in answers or not answers[r].waits_for]
        if not waits_for:
            break
        path.append(min(free, key=seems_late) if free else waits_for[0])
    return path


def report(title: str, answers: Answers, hosts: Sequence[str]) -> str:
    """What every rank does, a line for each.

    Args:
      title: What happened, as a sentence.
      answers: Of the ranks that answered.
      hosts: The host of each rank.
    """
    lines = [f"multimesh: {title} What every rank does:"]
    for rank, host in enumerate(hosts):
        answer = answers.get(rank)
        if answer is not None:
            lines.append(f"  rank {rank} on {host}: {answer.text}")
            lines += [f"    {line}" for line in answer.stacks.splitlines()]
        elif rank > 0 and 0 not in answers:
            lines.append(f"  rank {rank} on {host}: cannot be asked without rank 0")
        else:
            lines.append(
                f"  rank {rank} on {host}: does not answer: it is stopped, its interpreter is "
                "blocked, or its host is cut off"
            )
    cycle = find_cycle(answers)
    if cycle:
        waits = zip(cycle, [*cycle[1:], cycle[0]], strict=True)
        lines.append("  a cycle: " + ", ".join(f"rank {a} waits for rank {b}" for a, b in waits))
    return "\n".join(lines) + "\n"
