"""The paper's figures, drawn from findings, with the paper's values as diamonds.

Every figure is a PNG and an SVG whose bytes depend on the findings alone (and on matplotlib).
``table1`` shows every engine it is given, the others the first.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from prefixshield.evaluation.findings import EVENLY, FIG3B_COUNTS, NO_ATTACK, Findings, Measured
from prefixshield.evaluation.paper import Reported, reported

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

#: Told apart by everybody (Okabe and Ito's palette, with a grey).
_COLOURS = {
    "lru": "#999999",
    "s3fifo": "#E69F00",
    "never-hit-first": "#F0E442",
    "static-quota": "#CC79A7",
    "shield": "#0072B2",
    "no-segmentation": "#56B4E9",
    "no-debt-gate": "#D55E00",
}
_OTHER_COLOUR = "#009E73"

#: The paper's values: never a bar, so that nobody takes them for ours.
_PAPER_MARK = {"marker": "D", "color": "white", "markeredgecolor": "black", "ecolor": "black"}


class _Series(NamedTuple):
    """Values of ours and of the paper at the same places of an axis."""

    label: str
    colour: str
    ours: Sequence[Measured | None]
    papers: Sequence[Reported | None]


def draw(name: str, found: Sequence[Findings], output: Path) -> list[Path]:
    """Draw a figure of `FIGURES` into ``output/NAME.png`` and ``.svg``; returns both.

    ``found``: its experiment's findings, one per engine, at least one.
    """
    png, svg = output / f"{name}.png", output / f"{name}.svg"
    with _style():
        figure = FIGURES[name](found)
        figure.savefig(png, dpi=150, metadata={"Software": None})
        figure.savefig(svg, metadata={"Date": None})
    return [png, svg]


@contextmanager
def _style() -> Iterator[None]:
    """The same look and bytes everywhere, whatever the user's own settings are."""
    from matplotlib import style

    with style.context(["default", {"svg.hashsalt": "prefixshield"}]):
        yield


def _table1(found: Sequence[Findings]) -> Figure:
    title = "Table I: what the victim finds in the cache"
    figure = _figure(11, 1.2 + 3.3 * len(found), title)
    panels = list(figure.subplots(len(found), 1, squeeze=False).flat)
    for axes, findings in zip(panels, found, strict=True):
        variants = [name for name in findings.policies if not name.endswith(NO_ATTACK)]
        policies = dict.fromkeys(p for name in variants for p in findings.policies[name])
        _bars(
            axes,
            variants,
            [
                _Series(
                    policy,
                    _COLOURS.get(policy, _OTHER_COLOUR),
                    [findings.hit_percent(name, policy) for name in variants],
                    [_percent("table1", name, policy) for name in variants],
                )
                for policy in policies
            ],
        )
        for place, name in enumerate(variants):
            if control := findings.hit_percent(name + NO_ATTACK, "lru"):
                level, ends = control.estimate.mean, (place - 0.45, place + 0.45)
                axes.hlines(level, *ends, colors="black", linestyles=":", label="lru, no attack")
        axes.set(title=f"{findings.engine} engine", ylabel="victim's hit ratio (%)", ylim=(0, 105))
    _legend(figure, panels)
    return figure


def _fig2(found: Sequence[Findings]) -> Figure:
    findings = found[0]
    figure = _figure(10, 7, f"Fig. 2: paired gain of shield over lru, {findings.engine} engine")
    panels = list(figure.subplots(2, 2).flat)
    parts = (
        ("(a) Capacity", "KV blocks configured", "{} blocks"),
        (
            "(b) Creation pressure",
            "blocks the attacker creates over its refill",
            "creation ratio {}",
        ),
        ("(c) Nominal load", "share of the prefill capacity", "load {}"),
        ("(d) Deployment", "GPU and model", "{}"),
    )
    left = list(findings.policies)
    for axes, (title, label, pattern) in zip(panels, parts, strict=True):
        prefix, suffix = pattern.split("{}")
        names = [name for name in left if name.startswith(prefix) and name.endswith(suffix)]
        left = [name for name in left if name not in names]
        axes.axhline(0, color="0.7", linewidth=1)
        places = [name for name in names if not name.endswith(EVENLY)]
        series = _Series(
            "shield minus lru",
            _COLOURS["shield"],
            [findings.difference_pp(name, "shield", "lru") for name in places],
            [reported("fig2", name, "shield", "minus_lru_pp") for name in places],
        )
        # The paper does not say how it paces the attacker.
        evenly = _Series(
            "the same, evenly paced",
            _OTHER_COLOUR,
            [findings.difference_pp(name + EVENLY, "shield", "lru") for name in places],
            [],
        )
        shown = [name.removeprefix(prefix).removesuffix(suffix) for name in places]
        _marks(axes, shown, series, evenly)
        axes.set(title=title, xlabel=label, ylabel="gain in hit ratio (pp)")
    _legend(figure, panels)
    return figure


def _fig3a(found: Sequence[Findings]) -> Figure:
    findings = found[0]
    names = list(findings.policies)
    figure = _figure(7.5, 4.2, f"Fig. 3a: what segmentation adds, {findings.engine} engine")
    axes = figure.subplots()
    axes.axhline(0, color="0.7", linewidth=1)
    series = _Series(
        "shield minus no-segmentation",
        _COLOURS["shield"],
        [findings.difference_pp(name, "shield", "no-segmentation") for name in names],
        [reported("fig3a", name, "shield", "minus_no-segmentation_pp") for name in names],
    )
    _bars(axes, names, [series], width=0.4)
    axes.set_ylabel("paired gain in hit ratio (pp)")
    _legend(figure, [axes])
    return figure


def _fig3b(found: Sequence[Findings]) -> Figure:
    findings = found[0]
    names = list(findings.policies)
    figure = _figure(10, 7, f"Fig. 3b: replay while in debt, {findings.engine} engine")
    panels = list(figure.subplots(2, 2).flat)
    titles = {
        "promoted_blocks": "Attacker's blocks promoted",
        "evicted_attacker_blocks": "Attacker's blocks evicted by neutral",
        "evicted_victim_blocks": "Victim's blocks evicted by neutral",
        "hit_ratio": "Victim's hit ratio",
    }
    policies = dict.fromkeys(p for name in names for p in findings.policies[name])
    for axes, (quantity, title) in zip(panels, titles.items(), strict=True):
        series = []
        for policy in policies:
            if quantity == "hit_ratio":
                ours = [findings.hit_percent(name, policy) for name in names]
                papers = [_percent("fig3b", name, policy) for name in names]
            else:
                value = FIG3B_COUNTS[quantity]
                ours = [findings.mean(name, policy, value) for name in names]
                papers = [reported("fig3b", name, policy, quantity) for name in names]
            series.append(_Series(policy, _COLOURS.get(policy, _OTHER_COLOUR), ours, papers))
        _bars(axes, [name.removeprefix("wait ") for name in names], series)
        unit = "hit ratio (%)" if quantity == "hit_ratio" else "blocks per run"
        axes.set(title=title, xlabel="wait, as a share of the clearance time", ylabel=unit)
        axes.set_ylim(bottom=0)
    _legend(figure, panels)
    return figure


#: Figures by the name of their experiment.
FIGURES: Mapping[str, Callable[[Sequence[Findings]], Figure]] = {
    "table1": _table1,
    "fig2": _fig2,
    "fig3a": _fig3a,
    "fig3b": _fig3b,
}


def _figure(width: float, height: float, title: str) -> Figure:
    """Made without pyplot: nothing global, no window, drawn by Agg."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), layout="constrained")
    figure.suptitle(f"{title}, mean and 95% CI", fontweight="bold")
    return figure


def _percent(experiment: str, variant: str, policy: str) -> Reported | None:
    ratio = reported(experiment, variant, policy, "hit_ratio")
    return Reported(100 * ratio.value) if ratio else None


def _bars(
    axes: Axes, places: Sequence[str], series: Sequence[_Series], width: float = 0.86
) -> None:
    """Bars in groups, one group per place."""
    bar = width / len(series)
    for number, one in enumerate(series):
        offset = (number - (len(series) - 1) / 2) * bar
        for place, ours in enumerate(one.ours):
            if ours:
                x = place + offset
                axes.bar(x, ours.estimate.mean, bar * 0.92, color=one.colour, label=one.label)
                _interval(axes, x - bar * 0.18, ours, "black", "none")
        # Beside a lone bar; on the bar where others stand next to it.
        _paper_marks(axes, one.papers, offset + bar * (0.18 if len(series) > 1 else 0.7))
    axes.set_xticks(range(len(places)), places)


def _marks(axes: Axes, places: Sequence[str], series: _Series, second: _Series) -> None:
    """Points, ours left of the paper's."""
    for one, offset, marker in ((series, -0.15, "o"), (second, 0.0, "s")):
        for place, ours in enumerate(one.ours):
            if ours:
                _interval(axes, place + offset, ours, one.colour, marker, label=one.label)
    _paper_marks(axes, series.papers, 0.15)
    axes.set_xticks(range(len(places)), places)
    axes.margins(x=0.15, y=0.12)


def _interval(
    axes: Axes, x: float, ours: Measured, colour: str, marker: str, label: str | None = None
) -> None:
    mean, low, high = ours.estimate
    ends = [[mean - low], [high - mean]] if low < high else None
    axes.errorbar(
        x, mean, yerr=ends, color=colour, marker=marker, capsize=3, linewidth=1.2, label=label
    )


def _paper_marks(axes: Axes, papers: Sequence[Reported | None], offset: float) -> None:
    for place, paper in enumerate(papers):
        if paper is None:
            continue
        ends = None
        if paper.low is not None and paper.high is not None:
            ends = [[paper.value - paper.low], [paper.high - paper.value]]
        marks: dict[str, Any] = {**_PAPER_MARK, "markersize": 5, "capsize": 3, "zorder": 5}
        # At zero it would be half below the axis.
        axes.errorbar(
            place + offset,
            paper.value,
            yerr=ends,
            linestyle="none",
            clip_on=False,
            label="paper",
            **marks,
        )


def _legend(figure: Figure, panels: Sequence[Axes]) -> None:
    """One for all panels, each label once, below them."""
    entries: dict[str, Any] = {}
    for axes in panels:
        axes.spines[["top", "right"]].set_visible(False)
        for handle, label in zip(*axes.get_legend_handles_labels(), strict=True):
            entries.setdefault(label, handle)
    # The paper's last, wherever it was drawn.
    entries = dict(sorted(entries.items(), key=lambda entry: entry[0] == "paper"))
    figure.legend(
        entries.values(), entries.keys(), loc="outside lower center", ncols=5, frameon=False
    )
