"""The first sentence of a report: what won, by how much, on what, and whether the output changed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from . import statistics
from .report_runs import Run, count
from .statistics import Speedup
from .summary import ALL_TASKS, Row, hardware
from .tables import digits, interval


@dataclass(frozen=True)
class Fragment:
    """A piece of the first sentence."""

    text: str
    strong: bool = False


def headline(run: Run) -> list[Fragment]:
    """What won, by how much, on what, and whether the output changed: one sentence.

    Arms are ranked by decode speed-up; where some arm's first step brought several tokens, which flatters its decode
    time, by end-to-end speed-up. An arm that may change the output wins only where no other was measured.
    """
    baseline, ranking = run.summary.baseline, _ranking(run)
    if not ranking or baseline is None:
        return _uncompared(run, run.rows(run.scope))
    best, speedup = ranking[0]
    how = "end to end" if flattered(run) else "in decoding"
    where = f"on {run.scope}" if run.scope != ALL_TASKS else f"over {len(run.tasks)} tasks"
    if speedup.low is None or speedup.high is None:
        span = f" (too few prompts for an interval: {speedup.prompts})"
    else:
        span = f" (95 % interval {digits(speedup.low)} to {digits(speedup.high)}, {count(speedup.prompts, 'prompt')})"
    value, arm = Fragment(digits(speedup.value, "x"), True), Fragment(best.arm, True)
    duel = _head_to_head(run)
    if (
        speedup.verdict == "faster"
        and duel
        and duel[0].lossless == best.lossless
        and duel[1].verdict == "no difference"
    ):
        start = [arm, Fragment(" and "), Fragment(duel[0].arm, True),
                 Fragment(f", not told apart, were the fastest {where}: {best.arm} was "), value,
                 Fragment(f" as fast as {baseline} {how}")]  # fmt: skip
    elif speedup.verdict == "faster":
        start = [arm, Fragment(f" was the fastest {where}: "), value, Fragment(f" as fast as {baseline} {how}")]
    elif speedup.verdict is None:
        start = [arm, Fragment(f" measured best {where}: "), value, Fragment(f" as fast as {baseline} {how}")]
    else:
        nothing = "Nothing was faster than" if speedup.verdict == "slower" else "Nothing was measurably faster than"
        start = [Fragment(f"{nothing} {baseline} {where}: the best, "), arm, Fragment(", reached "), value,
                 Fragment(f" {how}")]  # fmt: skip
    return [*start, Fragment(f"{span}, {setup(run)}, {_output(best)}.")]


def _ranking(run: Run) -> list[tuple[Row, Speedup]]:
    """Arms with their speed-ups, the best first; lossy ones behind the others."""
    name = "e2e_speedup" if flattered(run) else "decode_speedup"
    found = [(row, getattr(row, name)) for row in run.rows(run.scope) if not row.baseline]
    return sorted(((row, one) for row, one in found if one), key=lambda one: (not one[0].lossless, -one[1].value))


def flattered(run: Run) -> bool:
    return any(caution.code == "first-step" for caution in run.summary.cautions)


def _uncompared(run: Run, rows: Sequence[Row]) -> list[Fragment]:
    timed = [row for row in rows if row.decode_tokens_per_s]
    if not timed:
        return [Fragment(f"Nothing could be compared, {setup(run)}.")]
    best = max(timed, key=lambda row: row.decode_tokens_per_s or 0)
    why = "No baseline was measured, so there is no speed-up: " if not run.summary.baseline else "Nothing to compare: "
    return [Fragment(why), Fragment(best.arm, True), Fragment(" decoded "),
            Fragment(f"{digits(best.decode_tokens_per_s)} tok/s", True), Fragment(f", {setup(run)}.")]  # fmt: skip


def setup(run: Run) -> str:
    """Models, precision, hardware."""
    arms = {arm["name"]: arm for arm in run.manifest.get("arms") or []}
    roles: dict[str, list[str]] = {}
    dtypes: list[str] = []
    for arm in arms.values():
        for role, facts in (arm.get("roles") or {}).items():
            roles.setdefault(role, []).append(str(facts.get("model")))
            dtypes += [str(facts["dtype"])] if role == "target" and facts.get("dtype") else []
    models = "/".join(dict.fromkeys(roles.pop("target", [])))
    drafts = [f"{role} {'/'.join(dict.fromkeys(names))}" for role, names in roles.items()]
    text = f"with {models or 'an unnamed model'}" + (f" ({', '.join(drafts)})" if drafts else "")
    text += f" in {'/'.join(dict.fromkeys(dtypes))}" if dtypes else ""
    machine = hardware(run.summary.environment, arms)
    return text + (f" on {machine}" if machine else "")


def _output(row: Row) -> str:
    report = row.exactness or {}
    if not row.lossless:
        return "and it is lossy: its output may differ from what the target model would write"
    compared, different, near = (report.get(name) or 0 for name in ("compared", "different", "near_tie"))
    if not compared:
        return "and whether its output changed was not compared"
    if different:
        return f"but its output changed in {different} of {compared} samples, and not by near-ties"
    if near:
        return f"and its output changed in near-ties only ({near} of {compared} samples)"
    return f"and its output did not change ({compared} of {compared} samples equal, token for token)"


def runner_up(run: Run) -> str:
    """How sure it is that the best arm beats the next one: the two against each other over the same prompts."""
    duel = _head_to_head(run)
    if duel is None:
        return ""
    second, speedup = duel
    told = {"faster": "ahead of it", "slower": "behind it", "no difference": "not told apart from it"}
    verdict = told.get(speedup.verdict or "", "too few prompts to tell them apart")
    what = "Next best is" if second.lossless else "Not lossless:"
    return f"{what} {second.arm}; against it {_ranking(run)[0][0].arm} reached {interval(speedup)}: {verdict}."


def _head_to_head(run: Run) -> tuple[Row, Speedup] | None:
    """The second of the ranking, and the speed-up of the first over it; None for fewer than two."""
    ranking = _ranking(run)
    if len(ranking) < 2:
        return None
    best, second = (row.arm for row, _ in ranking[:2])
    pairing = statistics.Pairing()
    for task in run.tasks:
        pairing += statistics.pair(run.measured(task, second), run.measured(task, best))
    per_token = any(one.per_token for _, one in ranking[:2])
    ratio = statistics.e2e_speedup if flattered(run) else statistics.decode_speedup
    speedup = ratio(pairing.pairs if per_token else pairing.matched, per_token)
    return None if speedup is None else (ranking[1][0], speedup)
