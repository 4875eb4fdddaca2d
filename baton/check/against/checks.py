"""The checks, in the order in which they run. Each asks a server and compares its answers."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

from baton.check.against.answer import Answer
from baton.check.against.prompts import Tenant, greedy, seeded
from baton.check.against.server import CHAT, COMPLETIONS, Body, Refused
from baton.check.against.trial import Failure, Finding, Trial, difference, largest_gap, note_gap

ALONE = "asked alone"
_NUM_CHOICES = 3
#: Of clients, the part that breaks the connection, after a number of pieces up to this.
_CANCEL_EVERY, _MAX_PIECES = 2, 8
#: Rounding of float32 in a sum of probabilities.
_EPSILON = 1e-3


@dataclass(frozen=True, slots=True)
class Check:
    """claim: what holds if it finds no failure."""

    name: str
    claim: str
    run: Callable[[Trial], Finding]


def stream(trial: Trial) -> Finding:
    failures = []
    for body, whole in (*trial.greedy, *trial.seeded):
        streamed = trial.server.stream(COMPLETIONS, body)
        faults = [*whole.faults, *streamed.faults, difference(whole, streamed)]
        if streamed.usage is None:
            faults.append("no usage, though stream_options asked for it")
        elif whole.usage and streamed.usage.completion != whole.usage.completion:
            faults.append(f"usage {streamed.usage} instead of {whole.usage}")
        failures += [
            Failure(fault, f"streamed, {ALONE}", COMPLETIONS, body) for fault in faults if fault
        ]
    return Finding(len(trial.greedy) + len(trial.seeded), tuple(failures))


def chat(trial: Trial) -> Finding:
    failures, prompts = [], trial.prompts.mixed(max(1, trial.num_requests // 4))
    for prompt in prompts:
        messages = [{"role": "user", "content": prompt}]
        body = {"messages": messages, "max_tokens": trial.max_tokens, "temperature": 0}
        whole, streamed = trial.server.ask(CHAT, body), trial.server.stream(CHAT, body)
        faults = (*whole.faults, *streamed.faults, difference(whole, streamed))
        failures += [Failure(fault, f"streamed, {ALONE}", CHAT, body) for fault in faults if fault]
    return Finding(len(prompts), tuple(failures))


def usage(trial: Trial) -> Finding:
    failures = []
    for body, answer in (*trial.greedy, *trial.seeded):
        failures += [Failure(f, ALONE, COMPLETIONS, body) for f in _usage_faults(body, answer)]
    return Finding(len(trial.greedy) + len(trial.seeded), tuple(failures))


def _usage_faults(body: Body, answer: Answer) -> list[str]:
    used = answer.usage
    if used is None:
        return ["no usage"]
    if len(answer.choices) != 1:
        return [f"{len(answer.choices)} choices instead of 1"]
    faults = []
    if used.total != used.prompt + used.completion:
        faults.append(f"{used.total} tokens in all for {used.prompt} and {used.completion}")
    if used.completion > body["max_tokens"]:
        faults.append(f"{used.completion} tokens for max_tokens {body['max_tokens']}")
    (choice,) = answer.choices
    # The token that ends an answer may be counted without being shown.
    if choice.positions and used.completion - len(choice.positions) not in (0, 1):
        faults.append(f"{used.completion} tokens are charged for {len(choice.positions)}")
    if choice.finish == "length" and used.completion != body["max_tokens"]:
        faults.append(f"it ended by length after {used.completion} tokens")
    return faults


def greedy_under_load(trial: Trial) -> Finding:
    return _under_load(trial, trial.greedy)


def seeded_under_load(trial: Trial) -> Finding:
    return _under_load(trial, trial.seeded)


def _under_load(trial: Trial, alone: tuple[tuple[Body, Answer], ...]) -> Finding:
    """All at once, half of them streamed."""

    def again(item: tuple[int, tuple[Body, Answer]]) -> Answer:
        index, (body, _) = item
        return trial.server.stream(COMPLETIONS, body) if index % 2 else trial.ask(body)

    answers = trial.at_once(again, list(enumerate(alone)))
    return _compared(alone, answers, f"{trial.concurrency} at once")


def _compared(alone: tuple[tuple[Body, Answer], ...], answers: list[Answer], how: str) -> Finding:
    failures, gaps = [], []
    for (body, expected), answer in zip(alone, answers, strict=True):
        gaps.append(largest_gap(expected, answer))
        faults = (*answer.faults, difference(expected, answer))
        failures += [Failure(fault, how, COMPLETIONS, body) for fault in faults if fault]
    return Finding(len(answers), tuple(failures), note_gap(gaps))


def cancels(trial: Trial) -> Finding:
    """Half of the clients break the connection; the others, and those that come back, are right."""
    lengths = [trial.rng.randint(1, _MAX_PIECES) for _ in trial.greedy]

    def act(index: int) -> Answer | None:
        body = trial.greedy[index][0]
        if index % _CANCEL_EVERY == 0:
            trial.server.stream(COMPLETIONS, body, lengths[index])
            return None
        return trial.server.stream(COMPLETIONS, body)

    kept = trial.at_once(act, range(len(trial.greedy)))
    stayed = [(own, answer) for own, answer in zip(trial.greedy, kept, strict=True) if answer]
    how = f"{trial.concurrency} at once, half of them broken off"
    beside = _compared(tuple(own for own, _ in stayed), [answer for _, answer in stayed], how)
    back = _compared(
        trial.greedy,
        [trial.ask(body) for body, _ in trial.greedy],
        f"{ALONE}, after {how}",
    )
    return Finding(
        beside.num_tried + back.num_tried, beside.failures + back.failures, back.note or beside.note
    )


def cache(trial: Trial) -> Finding:
    """A prompt that no cache can hold, then the same again, and after others with its prefix."""
    failures, gaps, cached = [], [], 0
    for _ in range(trial.num_requests):
        prefix = f"{trial.prompts.nonce()} {trial.prompts.prefix()}"
        one, other = (f"{prefix} {trial.prompts.words(12)}" for _ in range(2))
        body = greedy(one, trial.max_tokens, **trial.more)
        cold = trial.ask(body)
        trial.ask(greedy(other, 1))
        warm = trial.ask(body)
        cached += bool(warm.usage and warm.usage.cached)
        gaps.append(largest_gap(cold, warm))
        if fault := difference(cold, warm):
            failures.append(Failure(fault, "asked twice; the first time cold", COMPLETIONS, body))
    notes = (f"{cached} reported as hits" if cached else "no hits reported", note_gap(gaps))
    return Finding(trial.num_requests, tuple(failures), ", ".join(filter(None, notes)))


def choices(trial: Trial) -> Finding:
    """n choices: all there, by number; greedy ones equal; counted; the same when asked again and
    when streamed."""
    failures, has_greedy = [], _has_greedy_choices(trial)
    prompts = trial.prompts.mixed(max(2, trial.num_requests // 2))
    for index, prompt in enumerate(prompts):
        is_greedy = has_greedy and index % 2 == 0
        body = (
            greedy(prompt, trial.max_tokens, n=_NUM_CHOICES, **trial.more)
            if is_greedy
            else seeded(prompt, trial.max_tokens, index, n=_NUM_CHOICES, **trial.more)
        )
        answer, again = trial.ask(body), trial.server.stream(COMPLETIONS, body)
        faults = [*answer.faults, *again.faults, difference(answer, again)]
        if len(answer.choices) != _NUM_CHOICES:
            faults.append(f"{len(answer.choices)} choices for n {_NUM_CHOICES}")
        if is_greedy and len(set(answer.texts)) > 1:
            faults.append("greedy choices of one answer differ")
        shown = sum(len(choice.positions) for choice in answer.choices)
        ended = sum(choice.finish == "stop" for choice in answer.choices)
        if shown and answer.usage and not 0 <= answer.usage.completion - shown <= ended:
            faults.append(f"{answer.usage.completion} tokens are charged for {shown}")
        failures += [Failure(fault, ALONE, COMPLETIONS, body) for fault in faults if fault]
    return Finding(len(prompts), tuple(failures), "" if has_greedy else "none greedy, as refused")


def _has_greedy_choices(trial: Trial) -> bool:
    """Whether the server takes n with temperature 0, which some refuse."""
    try:
        trial.ask(greedy("def", 1, n=_NUM_CHOICES))
    except Refused as error:
        if not error.is_unserved:
            raise
        return False
    return True


def logprobs(trial: Trial) -> Finding:
    if not trial.more:
        return Finding(0, untried="the server gives no log probabilities")
    failures = []
    for body, answer in (*trial.greedy, *trial.seeded):
        faults = _logprob_faults(answer, is_greedy=body["temperature"] == 0)
        failures += [Failure(fault, ALONE, COMPLETIONS, body) for fault in faults]
    return Finding(len(trial.greedy) + len(trial.seeded), tuple(failures))


def _logprob_faults(answer: Answer, *, is_greedy: bool) -> list[str]:
    if len(answer.choices) != 1:
        return [f"{len(answer.choices)} choices instead of 1"]
    (choice,) = answer.choices
    joined = "".join(position.token for position in choice.positions)
    faults = []
    # Parts of a character, and tokens that are not shown, have no text of their own.
    if joined.isascii() and choice.text.isascii() and not joined.startswith(choice.text):
        faults.append(f"tokens spell {joined!r}, the text is {choice.text!r}")
    for index, position in enumerate(choice.positions):
        if not position.logprob <= 0 or math.isnan(position.logprob):
            faults.append(f"token {index} has the log probability {position.logprob}")
        if sum(map(math.exp, position.top.values())) > 1 + _EPSILON:
            faults.append(f"probabilities at token {index} sum to more than 1")
        if is_greedy and position.logprob < max(position.top.values(), default=-math.inf):
            faults.append(f"token {index} is not the most probable one")
    return faults


def canaries(trial: Trial) -> Finding:
    """Prompts that share a prefix and end in secrets, with streams that break off, and short ones
    between; then each alone. No answer has another's secret."""
    tenants = trial.prompts.tenants(trial.num_requests)
    num_own, failures = 0, list[Failure]()

    def ask(item: tuple[int, Tenant]) -> tuple[Tenant, Answer]:
        index, tenant = item
        body = greedy(tenant.prompt, trial.max_tokens)
        stop_after = 1 + index % _MAX_PIECES if index % 3 == 0 else None
        return tenant, trial.server.stream(COMPLETIONS, body, stop_after)

    crowd = [(index, tenant) for index, tenant in enumerate(tenants * 2)]
    trial.rng.shuffle(crowd)
    loaded = trial.at_once(ask, crowd)
    alone = [ask((1, tenant)) for tenant in tenants]
    for how, answers in ((f"{trial.concurrency} at once", loaded), ("alone afterwards", alone)):
        for tenant, answer in answers:
            text = "".join(answer.texts)
            num_own += tenant.canary in text
            for other in tenants:
                if other is not tenant and other.canary in text:
                    body = greedy(tenant.prompt, trial.max_tokens)
                    what = f"the answer has {other.canary!r}, which is another prompt's"
                    failures.append(Failure(what, how, COMPLETIONS, body))
    num_answers = len(loaded) + len(alone)
    return Finding(
        num_answers, tuple(failures), f"{num_own} of {num_answers} repeat their own secret"
    )


CHECKS = (
    Check("stream", "a stream is the whole answer: each token once, in order, one end", stream),
    Check("chat", "the same for chats", chat),
    Check("usage", "usage counts the tokens that came", usage),
    Check("greedy", "greedy answers under load are those of a request alone", greedy_under_load),
    Check("seeded", "seeded answers under load are those of a request alone", seeded_under_load),
    Check("cancels", "clients that break off harm nobody, and may come back", cancels),
    Check("cache", "a prompt from the prefix cache is answered as a cold one", cache),
    Check("n", "n choices: complete, counted, the same again", choices),
    Check("logprobs", "log probabilities fit the tokens", logprobs),
    Check("canaries", "another prompt's content is never in an answer", canaries),
)


def run_check(check: Check, trial: Trial) -> Finding:
    """A check's finding. A request that the server does not take leaves it untried; one that it
    takes and does not answer is a failure."""
    try:
        return check.run(trial)
    except Refused as error:
        if error.is_unserved:
            return Finding(0, untried=error.message)
        return Finding(1, (Failure(error.message, "one of its requests", COMPLETIONS, {}),))
