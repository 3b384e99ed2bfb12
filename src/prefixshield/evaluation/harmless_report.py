"""What `harmless` measured, as ``summary.md`` and two figures, from its files alone."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING, Any, NamedTuple

from prefixshield.core import ghosts, order, trial
from prefixshield.evaluation.figures import _style
from prefixshield.evaluation.harmless import (
    DEFAULT,
    HELD_OUT_SEEDS,
    LRU,
    PAPER,
    S3FIFO,
    SECTIONS,
    UNSEEN_ATTACK,
    Score,
    read_manifest,
    read_scores,
)
from prefixshield.evaluation.markdown import NOTHING, table
from prefixshield.evaluation.results import replace_files
from prefixshield.evaluation.variations import ABLATIONS, CONSTANTS, UNCHANGED

if TYPE_CHECKING:
    from matplotlib.axes import Axes

#: Bounds in points: how far the default preset may be below the better of LRU and S3-FIFO on
#: ordinary traffic, and below the paper preset under attack.
HARM_BOUND = -1.0
ATTACK_BOUND = -0.5

_BLUE, _ORANGE, _GREEN = "#0072B2", "#D55E00", "#009E73"

_ABOUT = {
    "benign": "Constants of the preset were chosen on the traces and the mixtures among these.",
    "held-out": "The mixtures of ordinary traffic made from the seeds "
    f"{', '.join(map(str, HELD_OUT_SEEDS))}, on which nothing was chosen; refill scales other than "
    "1 for the first of them.",
    "attacks": "Hit ratio of the benign requests, mean over the seeds, and the worst margins of a "
    f"seed. Bounds: {ATTACK_BOUND:+g} to the paper preset, 0 to LRU.",
    "alone": "The requests of every input given to one group: nobody else can pay, so refill rates "
    "must not matter at all.",
    "ablations": "The preset without one of its parts, on part of the inputs.",
    "sensitivity": "Other values of every constant, on part of the inputs; the default in bold.",
}

_TITLES = {
    "benign": "Ordinary traffic",
    "held-out": "Held out from the design",
    "attacks": "Attacks",
    "alone": "One tenant alone",
    "ablations": "Ablations",
    "sensitivity": "Sensitivity to constants",
}


class Distance(NamedTuple):
    """A score under a preset of ours, less that of the better of LRU and S3-FIFO."""

    score: Score
    lru: float
    """Hit ratios of the baselines at the same place, percent."""
    s3fifo: float

    @property
    def points(self) -> float:
        return self.score.percent - max(self.lru, self.s3fifo)


class Margin(NamedTuple):
    """A default score under attack, and hit ratios at the same place, percent."""

    score: Score
    lru: float
    paper: float

    @property
    def broken(self) -> bool:
        points = self.score.percent
        return points - self.paper < ATTACK_BOUND or points < self.lru


def write_report(output: Path) -> list[Path]:
    """Write ``summary.md`` and the figures of the sections that are there; returns their paths."""
    scores = read_scores(output)
    sections = {score.section for score in scores}
    replace_files(output, {"summary.md": summary(scores, read_manifest(output))})
    written = [output / "summary.md"]
    if "benign" in sections:
        written.append(_draw_harm(distances(scores, "benign"), output / "harm.png"))
    if "sensitivity" in sections:
        written.append(_draw_sensitivity(scores, output / "sensitivity.png"))
    return written


def distances(scores: Sequence[Score], section: str) -> list[Distance]:
    """Of all scores of both presets that have baselines at their place, in the file's order."""
    there = [score for score in scores if score.section == section]
    base = {(score.place, score.policy): score.percent for score in there}
    return [
        Distance(score, base[score.place, LRU], base[score.place, S3FIFO])
        for score in there
        if score.policy in (PAPER, DEFAULT) and (score.place, S3FIFO) in base
    ]


def margins(scores: Sequence[Score], section: str) -> list[Margin]:
    """Of all default scores on attacked traffic, in the file's order.

    Where there is no paper score at a refill scale, the one at scale 1 counts.
    """
    there = [score for score in scores if score.section == section]
    base = {(score.place, score.policy, score.refill_scale): score.percent for score in there}
    return [
        Margin(
            score,
            base[score.place, LRU, None],
            base[score.place, PAPER, score.refill_scale],
        )
        for score in there
        if score.policy == DEFAULT and (score.place, PAPER, score.refill_scale) in base
    ]


def summary(scores: Sequence[Score], manifest: Mapping[str, Any]) -> str:
    """Markdown, from the rows alone but for how they came."""
    parts = [
        "# Does the default preset harm anybody?",
        "Serial replay. Hit ratios in percent of the blocks of measured requests; distances from "
        "the better of LRU and S3-FIFO in points. Pool sizes in percent of an input's unique "
        "blocks, refill scales are factors on the paper's contracts. Every row is in "
        "[scores.csv](scores.csv), how it came in [experiment.json](experiment.json).",
        table(
            ("section", "command", "commit", "replays"),
            [
                (name, f"`{how['command']}`", how["commit"], how["replays"])
                for name, how in manifest.items()
            ],
            names=3,
        ),
    ]
    bodies: Mapping[str, Callable[[Sequence[Score], str], list[str]]] = {
        "benign": _benign,
        "held-out": _benign,
        "attacks": _attacks,
        "alone": _alone,
        "ablations": _ablations,
        "sensitivity": _sensitivity,
    }
    for name in SECTIONS:
        if any(score.section == name for score in scores):
            parts += [f"## {_TITLES[name]}", _ABOUT[name], *bodies[name](scores, name)]
    return "\n\n".join(parts) + "\n"


# --- ordinary traffic ---


def _benign(scores: Sequence[Score], section: str) -> list[str]:
    found = distances(scores, section)
    ours = [one for one in found if one.score.policy == DEFAULT]
    papers = [one for one in found if one.score.policy == PAPER]
    rows = [_overall("default, all scales", ours)]
    for scale in sorted({one.score.refill_scale or 0 for one in ours}):
        name = f"default, refill scale {scale:g}"
        rows.append(_overall(name, [one for one in ours if one.score.refill_scale == scale]))
    rows.append(_overall("paper, refill scale 1", papers))
    return [
        _overall_table(rows),
        _below(ours),
        "The worst distance by input and pool, over refill scales and seeds:",
        _by_input(found),
        *(["![harm](harm.png)"] if section == "benign" else []),
    ]


def _overall_table(rows: Sequence[Sequence[str]]) -> str:
    return table(
        ("", "rows", f"below {HARM_BOUND:g}", "minimum", "mean distance", "mean", "LRU", "S3-FIFO"),
        rows,
        names=1,
    )


def _overall(name: str, found: Sequence[Distance]) -> Sequence[str]:
    points = [one.points for one in found]
    return (
        name,
        str(len(found)),
        str(sum(value < HARM_BOUND for value in points)),
        _signed(min(points)),
        _signed(fmean(points)),
        f"{fmean(one.score.percent for one in found):.2f}",
        f"{fmean(one.lru for one in found):.2f}",
        f"{fmean(one.s3fifo for one in found):.2f}",
    )


def _below(found: Sequence[Distance]) -> str:
    """The rows that break the bound."""
    low = sorted((one for one in found if one.points < HARM_BOUND), key=lambda one: one.points)
    if not low:
        return f"No row is below {HARM_BOUND:g}."
    rows = [
        (
            *_where(one.score),
            f"{one.lru:.2f}",
            f"{one.s3fifo:.2f}",
            f"{one.score.percent:.2f}",
            _signed(one.points),
        )
        for one in low
    ]
    header = ("input", "pool", "refill scale", "LRU", "S3-FIFO", "default", "distance")
    return f"Below {HARM_BOUND:g}:\n\n" + table(header, rows, names=1)


def _by_input(found: Sequence[Distance]) -> str:
    """The worst distance of the default preset by input and size; beside it the paper's."""
    worst: defaultdict[tuple[str, int | None, str], float] = defaultdict(lambda: float("inf"))
    for one in found:
        key = _label(one.score), one.score.size_percent, one.score.policy
        worst[key] = min(worst[key], one.points)
    inputs = dict.fromkeys(name for name, _, _ in worst)
    sizes = list(dict.fromkeys(size for _, size, _ in worst))
    policies = [name for name in (DEFAULT, PAPER) if any(key[2] == name for key in worst)]
    return table(
        ("worst at", *(f"{policy}, {size}%" for policy in policies for size in sizes)),
        [
            (name, *(_signed(worst[name, size, policy]) for policy in policies for size in sizes))
            for name in inputs
        ],
        names=1,
    )


# --- attacks ---


def _attacks(scores: Sequence[Score], section: str) -> list[str]:
    found = margins(scores, section)
    seen = [one for one in found if one.score.input != UNSEEN_ATTACK]
    unseen = [one for one in found if one.score.input == UNSEEN_ATTACK]
    broken = [one for one in seen if one.broken]
    parts = [
        f"{len(broken)} of {len(seen)} rows break a bound.",
        "Refill scale 1:",
        _attack_table(one for one in seen if one.score.refill_scale == 1),
    ]
    if others := [one for one in seen if one.score.refill_scale != 1]:
        parts += ["Other refill scales:", _attack_table(others)]
    if broken:
        rows = [
            (
                *_where(one.score),
                f"{one.lru:.2f}",
                f"{one.paper:.2f}",
                f"{one.score.percent:.2f}",
                _signed(one.score.percent - one.paper),
                _signed(one.score.percent - one.lru),
            )
            for one in broken
        ]
        header = ("input", "pool", "refill scale", "LRU", "paper", "default", "to paper", "to LRU")
        parts += ["The rows that break one:", table(header, rows, names=1)]
    if unseen:
        parts += [
            f"{UNSEEN_ATTACK}: an attacker with real reuse of its own creates little, so that debt "
            "hardly sees it. Not under the bounds.",
            _attack_table(unseen),
        ]
    return parts


def _attack_table(found: Iterable[Margin]) -> str:
    by_place: defaultdict[tuple[str, str, str], list[Margin]] = defaultdict(list)
    for one in found:
        _, pool, scale = _where(one.score)
        by_place[one.score.input, pool, scale].append(one)
    return table(
        (
            *("attack", "pool", "refill scale", "seeds", "LRU", "paper", "default"),
            *("worst to paper", "worst to LRU"),
        ),
        [
            (
                *place,
                len(there),
                f"{fmean(one.lru for one in there):.2f}",
                f"{fmean(one.paper for one in there):.2f}",
                f"{fmean(one.score.percent for one in there):.2f}",
                _signed(min(one.score.percent - one.paper for one in there)),
                _signed(min(one.score.percent - one.lru for one in there)),
            )
            for place, there in by_place.items()
        ],
        names=1,
    )


# --- one tenant alone ---


def _alone(scores: Sequence[Score], section: str) -> list[str]:
    found = distances(scores, section)
    hits: defaultdict[tuple[Any, ...], set[int]] = defaultdict(set)
    for one in found:
        hits[one.score.place].add(one.score.blocks_hit)
    different = [place for place, counts in hits.items() if len(counts) > 1]
    scales = ", ".join(
        f"{scale:g}" for scale in sorted({one.score.refill_scale or 0 for one in found})
    )
    names = "; ".join(f"{name} ({kind}), {size}%" for kind, name, _, size in different)
    return [
        f"Hits are the same at the refill scales {scales} at {len(hits) - len(different)} of "
        f"{len(hits)} places{f'; not at: {names}' if names else ''}.",
        _overall_table([_overall("default", found)]),
        _below(found),
        _by_input(found),
    ]


# --- variations ---


def _variation_row(scores: Sequence[Score], section: str, variation: str) -> tuple[float, ...]:
    """Mean and worst distance on ordinary traffic; worst margin to the paper preset and to LRU."""
    points = [
        one.points
        for one in distances(scores, section)
        if one.score.variation == variation and one.score.policy == DEFAULT
    ]
    under = [one for one in margins(scores, section) if one.score.variation == variation]
    return (
        fmean(points),
        min(points),
        min(one.score.percent - one.paper for one in under),
        min(one.score.percent - one.lru for one in under),
    )


_VARIATION_HEADER = ("mean distance", "worst distance", "worst to paper", "worst to LRU")


def _ablations(scores: Sequence[Score], section: str) -> list[str]:
    rows = [
        (name or "default preset", *map(_signed, _variation_row(scores, section, name)))
        for name in (UNCHANGED, *ABLATIONS)
    ]
    return [table(("variation", *_VARIATION_HEADER), rows, names=1)]


def _sensitivity(scores: Sequence[Score], section: str) -> list[str]:
    rows = [
        (
            constant,
            f"**{value}**" if name == UNCHANGED else value,
            *map(_signed, _variation_row(scores, section, name)),
        )
        for constant in CONSTANTS
        for name, value in _values(constant)
    ]
    return [
        table(("constant", "value", *_VARIATION_HEADER), rows),
        "![sensitivity](sensitivity.png)",
    ]


def _values(constant: str) -> list[tuple[str, str]]:
    """The variations of a constant and their values, in order, the default among them."""
    found = [(name, name.partition(" = ")[2]) for name in CONSTANTS[constant]]
    if constant == "PROVEN_SHARES":
        return [(UNCHANGED, ", ".join(f"{share:g}" for share in trial.PROVEN_SHARES)), *found]
    (owner,) = [one for one in (trial, order, ghosts) if constant in vars(one)]
    found.append((UNCHANGED, f"{getattr(owner, constant):g}"))
    return sorted(found, key=lambda one: float(one[1]))


# --- figures ---


def _draw_harm(found: Sequence[Distance], path: Path) -> Path:
    from matplotlib.figure import Figure

    inputs = list(dict.fromkeys(_label(one.score) for one in found))
    sizes = list(dict.fromkeys(one.score.size_percent for one in found))
    with _style():
        figure = Figure(
            figsize=(3.1 * len(sizes) + 2, 0.3 * len(inputs) + 1.9), layout="constrained"
        )
        panels = list(figure.subplots(1, len(sizes), sharey=True, squeeze=False).flat)
        for axes, size in zip(panels, sizes, strict=True):
            _harm_panel(axes, [one for one in found if one.score.size_percent == size], inputs)
            axes.set_title(f"pool of {size}% of the unique blocks", fontsize=10)
        panels[0].set_yticks(range(len(inputs)), inputs)
        panels[0].invert_yaxis()
        handles, labels = panels[0].get_legend_handles_labels()
        figure.legend(handles, labels, loc="outside upper center", ncols=len(labels), frameon=False)
        figure.supxlabel(
            "Ordinary traffic: points from the better of LRU and S3-FIFO (linear within 1)",
            fontsize=11,
        )
        figure.savefig(path, dpi=120, metadata={"Software": None})
    return path


def _harm_panel(axes: Axes, found: Sequence[Distance], inputs: Sequence[str]) -> None:
    axes.axvspan(HARM_BOUND, 0, color="#EEEEEE", label="within a point below")
    axes.axvline(0, color="black", linewidth=0.8)
    places = range(len(inputs))
    points: defaultdict[tuple[str, str], list[Distance]] = defaultdict(list)
    for one in found:
        points[_label(one.score), one.score.policy].append(one)
    ours = [[one.points for one in points[name, DEFAULT]] for name in inputs]
    axes.plot(
        [fmean(one.points for one in points[name, PAPER]) for name in inputs],
        places,
        "D",
        color=_ORANGE,
        markersize=5,
        label="paper, refill scale 1",
    )
    axes.hlines(
        places, [min(all_) for all_ in ours], [max(all_) for all_ in ours], color=_BLUE, linewidth=2
    )
    at_one = [
        [one.points for one in points[name, DEFAULT] if one.score.refill_scale == 1]
        for name in inputs
    ]
    label = "default, refill scale 1; line: scales 0.25 to 4"
    axes.plot([fmean(values) for values in at_one], places, "o", color=_BLUE, label=label)
    axes.set_xscale("symlog", linthresh=1)
    axes.set_xticks([-50, -10, -1, 0, 1, 10], ["-50", "-10", "-1", "0", "+1", "+10"])
    axes.grid(axis="y", linewidth=0.3)


def _draw_sensitivity(scores: Sequence[Score], path: Path) -> Path:
    from matplotlib.figure import Figure

    with _style():
        figure = Figure(figsize=(13, 6.5), layout="constrained")
        panels = list(figure.subplots(2, 4).flat)
        for axes in panels[len(CONSTANTS) :]:
            axes.set_axis_off()
        for axes, constant in zip(panels, CONSTANTS, strict=False):
            values = _values(constant)
            rows = [_variation_row(scores, "sensitivity", name) for name, _ in values]
            places = range(len(values))
            for label, colour, column in (
                ("mean distance", _BLUE, 0),
                ("worst distance", _ORANGE, 1),
                ("worst margin to the paper preset under attack", _GREEN, 2),
            ):
                axes.plot(places, [row[column] for row in rows], "o-", color=colour, label=label)
            chosen = [name for name, _ in values].index(UNCHANGED)
            axes.axvline(chosen, color="#BBBBBB", linewidth=6, zorder=0, label="default")
            axes.axhline(0, color="black", linewidth=0.6)
            shown = [value.replace(", ", "\n") for _, value in values]
            axes.set_xticks(places, shown, fontsize=8)
            axes.set_title(constant, fontsize=10)
        handles, labels = panels[0].get_legend_handles_labels()
        figure.legend(handles, labels, loc="outside lower center", ncols=4, frameon=False)
        figure.supylabel("points", fontsize=10)
        figure.suptitle("Constants of the default preset: distances on part of the inputs")
        figure.savefig(path, dpi=120, metadata={"Software": None})
    return path


# --- words ---


def _label(score: Score) -> str:
    """An input's name; of the kinds that share names, with the kind."""
    return f"{score.input} (trace)" if score.kind == "trace" else score.input


def _where(score: Score) -> tuple[str, str, str]:
    seed = f", seed {score.seed}" if score.kind != "trace" else ""
    pool = f"{score.size_percent}%" if score.size_percent else f"{score.blocks} blocks"
    scale = NOTHING if score.refill_scale is None else f"{score.refill_scale:g}"
    return f"{_label(score)}{seed}", pool, scale


def _signed(points: float) -> str:
    return format(round(points, 2) + 0.0, "+.2f")  # + 0.0: no minus sign before zero
