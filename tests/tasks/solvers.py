"""For each family a reader that knows its rules and nothing else: from spelled tokens to answers.

Plain Python on purpose: it shares no line with the generators. `answer` is given what stands
before an answer and says what must come; `facts` says which places of a whole example carry facts,
given where its answers stand.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise

Names = Sequence[str]


@dataclass(frozen=True)
class Solver:
    answer: Callable[[Names], str]
    facts: Callable[[Names, Sequence[int]], set[int]]


def followers(names: Names, word: str) -> list[str]:
    """The words that stood behind a word, itself at the end not counted."""
    return [b for a, b in pairwise(names) if a == word and not b.startswith("n")]


def only_follower(names: Names) -> str:
    (found,) = set(followers(names, names[-1]))
    return found


def two_hops_at_once(names: Names) -> str:
    (middle,) = followers(names, names[-1])
    (found,) = followers(names, middle)
    return found


def most_common_follower(names: Names) -> str:
    (first, count), *others = Counter(followers(names, names[-1])).most_common()
    assert all(less < count for _, less in others)
    return first


def words_before(names: Names, answers: Sequence[int]) -> set[int]:
    return {i for i in range(answers[0] - 1) if not names[i].startswith("n")}


def first_follower(names: Names) -> str:
    """Zoology's filler may repeat a key; pairs stand first."""
    return names[names.index(names[-1]) + 1]


def paired(names: Names, answers: Sequence[int]) -> set[int]:
    """As many pairs at the start as are asked for."""
    return set(range(2 * len(answers)))


def last_follower(names: Names) -> str:
    return followers(names, names[-1])[-1]


def last_pairs(names: Names, answers: Sequence[int]) -> set[int]:
    """Where each key that is asked for stood last before the questions."""
    context = names[: answers[0] - 1]
    starts = [len(context) - 1 - context[::-1].index(names[place - 1]) for place in answers]
    return {place for start in starts for place in (start, start + 1)}


def asked(text: str, pattern: str) -> tuple[str, int]:
    """Of which name the text ends in asking, and which digit."""
    found = re.search(rf"\?({pattern})=(\d?)$", text)
    assert found
    return found[1], len(found[2])


def last_result(names: Names) -> str:
    text = "".join(names)
    call, digit = asked(text, "[A-Z]:[a-z]")
    return re.findall(rf"{call}->(\d\d);", text)[-1][digit]


def standing_calls(names: Names, answers: Sequence[int]) -> set[int]:
    calls = list(re.finditer(r"([A-Z]:[a-z])->\d\d;", "".join(names[: answers[0]])))
    last = {call[1]: call for call in calls}
    return {place for call in last.values() for place in range(*call.span())}


STEP = r"([A-Z]) (mine|sell|make) (\d)([gw]) (?:   |(\d)([gw])([A-Z ]));"


def count_of(names: Names) -> str:
    text = "".join(names)
    who, digit = asked(text, "[A-Z][gw]")
    have: Counter[str] = Counter()
    for agent, verb, n, first, m, second, other in re.findall(STEP, text):
        sign = 1 if verb == "mine" else -1
        have[agent + first] += sign * int(n)
        if verb == "make":
            have[agent + second] -= int(m)
        if verb == "sell":
            have[agent + second] += int(m)
            have[other + first] += int(n)
            have[other + second] -= int(m)
        assert min(have.values()) >= 0
    return f"{have[who]:02}"[digit]


def told_steps(names: Names, answers: Sequence[int]) -> set[int]:
    steps = re.finditer(STEP, "".join(names[: answers[0]]))
    return {place for step in steps for place in range(*step.span())}


def assigned(pattern: str) -> Callable[[Names], str]:
    def answer(names: Names) -> str:
        text = "".join(names)
        name, digit = asked(text, pattern)
        # Names stand at the start or behind a separator, so that "ab" is not found in "cab".
        (value,) = re.findall(rf"(?:^|;){name}=(\d\d);", text)
        return value[digit]

    return answer


def first_assignments(count: int) -> Callable[[Names, Sequence[int]], set[int]]:
    def facts(names: Names, answers: Sequence[int]) -> set[int]:
        places = [m.span() for m in re.finditer(r"[a-z]+=\d\d;", "".join(names[: answers[0]]))]
        return {place for span in places[:count] for place in range(*span)}

    return facts


SOLVERS = {
    "mqar": Solver(only_follower, words_before),
    "overwritten": Solver(last_follower, last_pairs),
    "zoology": Solver(first_follower, paired),
    "system-prompt": Solver(only_follower, words_before),
    "tool-trace": Solver(only_follower, words_before),
    "niah": Solver(only_follower, words_before),
    "multihop": Solver(only_follower, words_before),
    "multihop, silent": Solver(two_hops_at_once, words_before),
    "common-word": Solver(most_common_follower, words_before),
    "tool-calling": Solver(last_result, standing_calls),
    "resource-economy": Solver(count_of, told_steps),
    "cot-retrieval": Solver(assigned("[a-z]"), first_assignments(4)),
    "specific-recall": Solver(assigned("[a-z][a-z]"), first_assignments(6)),
}
