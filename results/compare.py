"""Any number of runs side by side: what differs between them first, then every arm on the prompts that all have.

An arm is compared with the baseline of its own run, which was measured in turns with it, unless another baseline is
named. Runs of different models, dtypes, sampling or limits are refused: their arms do not do the same work. Nothing is
ever averaged over runs, so rows of different hardware stay apart.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from ..errors import MeasurementError, UsageError, unknown
from . import forecasts, metrics, served, statistics, summary
from .columns import join
from .comparison import GROUPINGS, METRICS, ComparedRow, Comparison
from .lossless import first_difference
from .paired import Paired, calls_of, distinct_prompts, drain_share, pair, speedup, spread
from .runs import ComparedArm, Difference, Run, baselines, differences, list_arms, told
from .statistics import Caution
from .summary import ALL_TASKS

Parted = dict[str, dict[tuple[str, int], list[dict[str, Any]]]]  # task -> prompt and turn -> where, once per repeat
Chosen = dict[tuple[int, str], np.ndarray]  # the places of an arm's samples, by the number of its run and its name


def compare(
    runs: Sequence[Run],
    baseline: str | None = None,
    metric: str = "decode",
    by: str = "task",
    force: bool = False,
) -> Comparison:
    """Every arm of the runs, by group, on the prompts that all arms with that task have.

    Args:
        baseline: an arm's name, label or `RUN:NAME`; by default that of each run.
        metric: what the verdict is about, one of METRICS: decode time, end-to-end latency, time to first token, or
            decode time per token.
        by: one of GROUPINGS.
        force: compare what should not be compared; a watermark says so.

    Raises:
        UsageError: a name that is not known, or runs that differ in what must not differ.
        MeasurementError: nothing in common, or nothing measured.
    """
    for what, value, known in (("metric", metric, METRICS), ("grouping", by, GROUPINGS)):
        if value not in known:
            raise UsageError(unknown(what, value, known))
    differing = differences(runs) if len(runs) > 1 else []
    refused = [difference for difference in differing if difference.refused]
    if refused and not force:
        what = "; ".join(told(difference, runs) for difference in refused)
        raise UsageError(f"these runs did not do the same work: they differ in {what}. --force compares them anyway")
    return _Comparing(runs, differing, baseline, metric, by).comparison()


class _Comparing:
    """The state of one comparison: all samples in one table, and who is compared with whom."""

    def __init__(
        self, runs: Sequence[Run], differing: list[Difference], baseline: str | None, metric: str, by: str
    ) -> None:
        self.runs, self.differing, self.metric, self.by = runs, differing, metric, by
        self.forced = [difference for difference in differing if difference.refused]
        self.arms = list_arms(runs)
        self.baselines = baselines(self.arms, baseline)
        self.columns, self.run_of = join([run.columns for run in runs])
        names = self.columns.names["arm"].numbers
        self.all = {
            arm.key: np.flatnonzero((self.run_of == arm.number) & (self.columns["arm"] == names.get(arm.name, -1)))
            for arm in self.arms
        }
        self.cautions: list[Caution] = []
        self.profiles = {number: forecasts.find(run.manifest) for number, run in enumerate(runs)}
        self.used: set[int] = set()  # runs whose profile something was predicted by

    def comparison(self) -> Comparison:
        common = self._in_common()
        rows = [row for group, chosen in self._groups(common) for row in self._rows(group, chosen)]
        if not any(row.n_ok for row in rows):
            raise MeasurementError("nothing measured: every sample failed")
        first = self.runs[0].manifest
        merged = {arm.label: arm.facts for arm in self.arms}
        watermarks = [line for run in self.runs for line in summary._watermarks(run.manifest, self._labelled(run))]
        if self.forced:
            what = ", ".join(difference.name for difference in self.forced)
            watermarks.insert(0, f"FORCED: these runs differ in {what}; their arms did not do the same work")
        self.cautions += self._of_runs()
        return Comparison(
            title=self._title(merged),
            watermarks=list(dict.fromkeys(watermarks)),
            baseline=next((self.baselines[arm.key].label for arm in self.arms if arm.key in self.baselines), None),
            settings=dict(first.get("settings") or {}),
            environment=dict(first.get("environment") or {}),
            rows=list(rows),
            cautions=self.cautions,
            notes=self._notes(),
            runs=[self._facts(run) for run in self.runs],
            differences=self.differing,
            metric=self.metric,
            by=self.by,
        )

    def _notes(self) -> list[str]:
        said = [(run, note) for run in self.runs for note in run.manifest.get("notes") or []]
        kept = [(run, self.profiles[number]) for number, run in enumerate(self.runs) if number in self.used]
        said += [(run, profile.note) for run, profile in kept if profile]
        return [note if len(self.runs) == 1 else f"{run.name}: {note}" for run, note in said]

    def _labelled(self, run: Run) -> dict[str, dict[str, Any]]:
        return {arm.label: arm.facts for arm in self.arms if arm.run is run}

    def _title(self, merged: dict[str, dict[str, Any]]) -> list[str]:
        first = self.runs[0].manifest
        if len(self.runs) == 1:
            return summary._title(first, merged)
        if not self.differing:
            same = f"{len(self.runs)} runs that differ in nothing that was recorded"
            return [same, *summary._title(first, merged)]
        lines = [f"{len(self.runs)} runs that differ in:"]
        lines += [f"- {told(difference, self.runs)}" for difference in self.differing]
        return lines + [f"of {self.runs[0].name}: {line}" for line in summary._title(first, merged)]

    def _facts(self, run: Run) -> dict[str, Any]:
        started = run.manifest.get("started")
        return {"name": run.name, "folder": str(run.path), "started": started, "hardware": run.hardware,
                "arms": {arm.name: arm.label for arm in self.arms if arm.run is run}}  # fmt: skip

    # Which samples

    def _in_common(self) -> Chosen:
        """The samples of each arm on prompts that all arms with that task have."""
        data = self.columns
        prompt = data["prompt_hash"] * (1 + data["turn"].max()) + data["turn"]
        keep = {key: np.zeros(len(chosen), dtype=bool) for key, chosen in self.all.items()}
        lost = []
        tasks = [int(task) for task in dict.fromkeys(data["task"].tolist())]
        for task in tasks:
            there = {key: prompt[at[data["task"][at] == task]] for key, at in self.all.items()}
            sets = [np.unique(prompts) for prompts in there.values() if len(prompts)]
            common = sets[0]
            for more in sets[1:]:
                common = np.intersect1d(common, more, assume_unique=True)
            name, total = data.names["task"].texts[task], len(np.unique(np.concatenate(sets)))
            if len(common) < total:
                what = f"{name}: {total - len(common)} of {total} prompt turns are not in every arm, and left out"
                self.cautions.append(Caution("left-out", what, name, None, total - len(common)))
            lost += [name] if not len(common) else []
            for key, at in self.all.items():
                keep[key] |= (data["task"][at] == task) & np.isin(prompt[at], common)
        if len(lost) == len(tasks):
            raise MeasurementError(
                f"nothing to compare: the arms have no prompt in common ({', '.join(lost)}); prompts are told apart by "
                "what the model read, so another template or tokenizer makes others of them"
            )
        return {key: at[keep[key]] for key, at in self.all.items()}

    def _groups(self, common: Chosen) -> Iterator[tuple[str, Chosen]]:
        """Names of the groups, and the samples of each arm in them."""
        column = {"task": "task", "category": "category", "prompt": "prompt_id"}[self.by]
        data, texts = self.columns, self.columns.names
        everything = np.concatenate(list(common.values()))
        both = data["task"] * len(texts[column].texts) + data[column]
        seen, first = np.unique(both[everything], return_index=True)
        groups = []
        for value in seen[np.argsort(everything[first], kind="stable")].tolist():
            task, inner = divmod(value, len(texts[column].texts))
            name = texts["task"].texts[task]
            if self.by != "task":
                name += f", {texts[column].texts[inner] or 'no category'}"
            groups.append((name, {key: at[both[at] == value] for key, at in common.items()}))
        yield from groups
        shapes = {tuple(len(chosen[key]) > 0 for _, chosen in groups) for key in common if len(common[key])}
        if self.by == "task" and len(groups) > 1 and len(shapes) == 1:
            yield ALL_TASKS, common

    # Rows

    def _rows(self, group: str, chosen: Chosen) -> list[ComparedRow]:
        there = [arm for arm in self.arms if len(chosen[arm.key])]
        there.sort(key=lambda arm: (self.baselines.get(arm.key) is not arm, arm.number))
        prompts = max((distinct_prompts(self.columns, chosen[arm.key]) for arm in there), default=0)
        if prompts < statistics.FEW_PROMPTS and self.by == "task" and group != ALL_TASKS:
            text = f"{group}: only {prompts} prompt{'' if prompts == 1 else 's'}; too few to generalise from"
            self.cautions.append(Caution("few-prompts", text, group, None, prompts))
        rows = []
        for arm in there:
            row = self._row(group, arm, chosen[arm.key])
            baseline = self.baselines.get(arm.key)
            if group != ALL_TASKS and self.by == "task":
                self.cautions += self._of_arm(group, arm, chosen[arm.key], row)
            if baseline is not None and baseline is not arm:
                self._against(group, row, arm, baseline, chosen)
            rows.append(row)
        if group != ALL_TASKS and self.by == "task":
            self.cautions += self._between_baselines(group, there, chosen)
        return rows

    def _row(self, group: str, arm: ComparedArm, chosen: np.ndarray) -> ComparedRow:
        data, roles = self.columns, arm.facts.get("roles") or {}
        ok = chosen[data["failed"][chosen] == 0]
        baseline = self.baselines.get(arm.key)
        row = ComparedRow(
            task=group, arm=arm.label, strategy=arm.facts.get("strategy", arm.name),
            engine=arm.facts.get("engine", "specbench"), baseline=baseline is arm, reference=baseline is arm,
            lossless=bool(arm.facts.get("lossless", True)), prompts=distinct_prompts(data, ok), n_ok=len(ok),
            n_failed=len(chosen) - len(ok), devices=metrics.devices(arm.facts), threads=metrics.threads(arm.facts),
            runtime=summary._distinct(roles, "runtime"), dtype=summary._distinct(roles, "dtype"),
            models={role: str(facts.get("model")) for role, facts in roles.items()},
            peak_memory_bytes=(arm.run.manifest.get("peak_memory_bytes") or {}).get(arm.name),
            continuous=bool(arm.facts.get("continuous")),
            run=arm.run.name, own_name=arm.name, hardware=arm.run.hardware, metric=self.metric,
        )  # fmt: skip
        if not len(ok):
            return row
        calls = calls_of(data, ok)
        drafting, e2e, ttft, tokens = data.drafting(ok), data["e2e_ns"][ok], data["ttft_ns"][ok], data["tokens"][ok]
        sums = {
            "decode_tokens": drafting.tokens, "ttft_ns": int(ttft.sum()), "decode_ns": int((e2e - ttft).sum()),
            "e2e_ns": int(e2e.sum()), "wall_ns": int(calls.wall_ns.sum()),
            "wall_tokens": int(calls.tokens.sum()), "steps": drafting.steps, "empty_steps": drafting.empty_steps,
            "drafted": drafting.drafted, "accepted": drafting.accepted, "wasted": drafting.wasted,
        }  # fmt: skip
        row.sums, row.tokens = sums, int(tokens.sum())
        row.tokens_per_sample = metrics.ratio(row.tokens, len(ok))
        row.ttft_p50_ns = metrics.percentile(ttft, 50)  # type: ignore[arg-type]
        row.tpot_ns = metrics.ratio(sums["decode_ns"], drafting.tokens)
        row.decode_tokens_per_s = metrics.ratio(drafting.tokens * metrics.NS_PER_S, sums["decode_ns"])
        row.e2e_tokens_per_s = metrics.ratio(row.tokens * metrics.NS_PER_S, sums["e2e_ns"])
        row.throughput_tokens_per_s = metrics.ratio(sums["wall_tokens"] * metrics.NS_PER_S, sums["wall_ns"])
        for percent in (50, 90, 99):
            setattr(row, f"latency_p{percent}_ns", metrics.percentile(e2e, percent))  # type: ignore[arg-type]
        for name in ("tokens_per_step", "accepted_per_step", "acceptance_rate", "acceptance_by_position",
                     "conditional_acceptance_by_position", "acceptance_by_level"):  # fmt: skip
            setattr(row, name, getattr(drafting, name))
        row.spread, row.drain_share = spread(data, ok), drain_share(calls)
        if served.is_served(arm.facts):
            served.tell_drafting(row, ())  # the records would have to be read whole
        return row

    def _against(self, group: str, row: ComparedRow, arm: ComparedArm, baseline: ComparedArm, chosen: Chosen) -> None:
        """Fills in what a row says about its baseline."""
        data, ours = self.columns, chosen[arm.key]
        pairing = pair(data, chosen[baseline.key], ours)
        row.compared_with = baseline.label
        same = summary._same_tokens(arm.facts, arm.run.manifest) and not self.forced
        same = same and bool(baseline.facts.get("lossless", True)) and not served.is_served(baseline.facts)
        # Arms that ought to emit the same tokens are compared where they did; the others per token.
        per_token = not (same and pairing.equal.any())
        pairs = pairing.places() if per_token else pairing.places(pairing.equal)
        row.decode_speedup = speedup(data, pairs, "decode", per_token)
        row.e2e_speedup = speedup(data, pairs, "e2e", per_token)
        known = {"decode": row.decode_speedup, "e2e": row.e2e_speedup}
        row.speedup = known[self.metric] if self.metric in known else speedup(data, pairs, self.metric, per_token)
        if row.speedup is not None:
            row.verdict, row.p_value = row.speedup.verdict, getattr(row.speedup, "p_value", None)
        theirs = metrics.devices(baseline.facts)
        if row.decode_speedup and row.devices and theirs:
            row.decode_speedup_per_device = row.decode_speedup.value * len(theirs) / len(row.devices)
        if baseline.name == baseline.run.manifest.get("baseline"):  # plain decoding, which predictions are held against
            row.profile_decode_speedup = self._forecast(arm, ours)
        row.cause = summary._cause(row, arm.facts, None, None)
        text_only = served.is_served(arm.facts) or served.is_served(baseline.facts)
        text_only = text_only and summary._greedy(arm.run.manifest) and not self.forced
        if row.lossless and (same or text_only):
            parted = _parted(arm, baseline) if text_only else {}
            row.exactness = self._exactness(arm, baseline, pairing, parted) | ({"text_only": True} if text_only else {})
        if group == ALL_TASKS or self.by != "task":
            return
        self.cautions += statistics.pairing_cautions(group, arm.label, baseline.label, pairing.counts(), same)
        report = row.exactness or {}
        if report.get("different"):
            counts = f"{report['different']} of {report['compared']} outputs differ from {baseline.label}'s"
            text = f"{group}, {arm.label}: {counts}, and no run found those to be near-ties"
            self.cautions.append(Caution("different-tokens", text, group, arm.label, report["different"]))
        if arm.run.hardware != baseline.run.hardware:
            text = f"{group}, {arm.label}: ran on {arm.run.hardware}, {baseline.label} on {baseline.run.hardware}; the "
            self.cautions.append(Caution("other-hardware", f"{text}ratio is one of machines too", group, arm.label))
        elif arm.run is not baseline.run:
            text = f"{group}, {arm.label}: was not measured in turns with {baseline.label}, but in another run"
            self.cautions.append(Caution("other-run", text, group, arm.label))

    def _forecast(self, arm: ComparedArm, chosen: np.ndarray) -> float | None:
        """Predicted by the profile that the cache folder keeps for a run, if there is one."""
        data, kept = self.columns, self.profiles[arm.number]
        ok = chosen[data["failed"][chosen] == 0]
        if kept is None or not len(ok):
            return None
        texts = data.names["task"].texts
        tasks = {texts[task] for task in np.unique(data["task"][ok]).tolist()}
        drafting, told = data.drafting(ok), ((data.steps(at), data.levels.get(at)) for at in ok.tolist())
        found = forecasts.speedup(kept, arm.facts, arm.run.manifest, drafting, len(ok), told, tasks)
        self.used |= {arm.number} if found else set()
        return found

    def _exactness(self, arm: ComparedArm, baseline: ComparedArm, pairing: Paired, parted: Parted) -> dict[str, Any]:
        """Outputs that are equal, and of the others those that a run's own report found to be near-ties there.

        Args:
            parted: what the run found by itself, of tasks whose ids are not to be compared here.
        """
        data = self.columns
        counts: dict[str, Any] = {"exact": 0, "near_tie": 0, "different": 0, "compared": 0, "first": []}
        near = _near_ties(arm) | _near_ties(baseline)
        for one, two in zip(pairing.left.tolist(), pairing.right.tolist(), strict=True):
            counts["compared"] += 1
            if parted and (task := data.text("task", two)) in parted:
                left = parted[task].get((data.text("prompt_id", two), int(data["turn"][two])))
                if left:
                    counts["first"].append(left.pop(0))
                    counts["near_tie" if counts["first"][-1]["near_tie"] else "different"] += 1
                else:
                    counts["exact"] += 1
                continue
            same = data.ids[one] == data.ids[two]
            index = None if same else first_difference(data.token_ids(one), data.token_ids(two))
            if index is None:
                counts["exact"] += 1
                continue
            key = (data.text("task", two), data.text("prompt_id", two), int(data["turn"][two]), index)
            counts["near_tie" if key in near else "different"] += 1
            _, prompt, turn, _ = key
            counts["first"].append({"prompt_id": prompt, "turn": turn, "index": index, "near_tie": key in near})
        return counts

    # Warnings

    def _of_arm(self, group: str, arm: ComparedArm, chosen: np.ndarray, row: ComparedRow) -> list[Caution]:
        """The same warnings as those of the run itself; records are made only where there is something to warn of."""
        data, found = self.columns, []
        ok = chosen[data["failed"][chosen] == 0]
        broken = int(data["broken"][ok].sum())
        if broken:
            text = f"{group}, {arm.label}: {broken} records contradict themselves"
            found.append(Caution("broken", text, group, arm.label, broken))
        early = (data["first_kept"][ok] > 1).any()
        unsteady, left = (row.spread or 0) > statistics.MOST_SPREAD, (row.drain_share or 0) > statistics.MOST_DRAIN
        if row.n_failed or early or unsteady or left:
            sound = ok[data["broken"][ok] == 0]
            failed = data.samples(chosen[data["failed"][chosen] == 1])
            found += statistics.arm_cautions(group, arm.label, data.samples(sound), failed)
        if row.baseline:
            found += statistics.drift_caution(group, arm.label, data.samples(ok[data["broken"][ok] == 0]))
        return found

    def _between_baselines(self, group: str, there: Sequence[ComparedArm], chosen: Chosen) -> list[Caution]:
        """Drift: the same baseline, on the same machine, in the first and in the last run."""
        same = [arm for arm in there if self.baselines.get(arm.key) is arm]
        same = [arm for arm in same if (arm.name, arm.run.hardware) == (same[0].name, same[0].run.hardware)]
        same.sort(key=lambda arm: str(arm.run.manifest.get("started") or ""))
        if len(same) < 2 or self.forced:
            return []
        first, last = same[0], same[-1]
        pairing = pair(self.columns, chosen[first.key], chosen[last.key])
        found = speedup(self.columns, pairing.places(), "decode", True)
        if found is None or found.verdict not in ("faster", "slower") or abs(found.value - 1) <= statistics.MOST_DRIFT:
            return []
        change = 1 / found.value - 1
        way = "slower" if change > 0 else "faster"
        text = (
            f"{group}: {last.name} of {last.run.name} was {statistics.percent(abs(change))} {way} than that of "
            f"{first.run.name}, on the same prompts and hardware; the machine drifted between the runs"
        )
        return [Caution("drift", text, group, last.label, change)]

    def _of_runs(self) -> list[Caution]:
        found = []
        if not self.columns["repeat"].any():
            found.append(Caution("one-repeat", "every prompt was measured once: how much repeats differ is not known"))
        for run in self.runs:
            who = "the run" if len(self.runs) == 1 else run.name
            if run.manifest.get("interrupted") or "finished" not in run.manifest:
                state = "was interrupted" if run.manifest.get("interrupted") else "did not end, or is still running"
                found.append(Caution("interrupted", f"{who} {state}; this is what was measured until then"))
            found += summary._thread_cautions(self._labelled(run), run.manifest)
        return found


def _near_ties(arm: ComparedArm) -> set[tuple[str, str, int, int]]:
    report = arm.run.manifest.get("lossless") or {}
    return {
        (task, first["prompt_id"], first["turn"], first["index"])
        for task, arms in report.items()
        for first in ((arms or {}).get(arm.name) or {}).get("first") or []
        if first.get("near_tie")
    }


def _parted(arm: ComparedArm, baseline: ComparedArm) -> Parted:
    """Where the answers of an arm part from those of its run's reference, as the run found it with its tokenizer.

    Ids of a text may differ from ids that spell the same. Empty for any other baseline, and without a report.
    """
    if arm.run is not baseline.run or baseline.name != arm.run.manifest.get("lossless_reference"):
        return {}
    found: Parted = {}
    for task, arms in (arm.run.manifest.get("lossless") or {}).items():
        if arm.name in (arms or {}):
            found[task] = {}
            for first in arms[arm.name].get("first") or []:
                where = {name: first.get(name) for name in ("prompt_id", "turn", "index", "near_tie")}
                found[task].setdefault((first["prompt_id"], first["turn"]), []).append(where)
    return found
