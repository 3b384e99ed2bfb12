"""The demo's picture, drawn from the report alone."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")

from matplotlib import pyplot as plt
from matplotlib.axes import Axes

from demo.report import POLICY_TITLES
from demo.traffic import TENANTS

#: Told apart by everybody (Okabe and Ito's palette).
POLICY_COLOURS = {"lru": "#D55E00", "shield": "#0072B2"}
OWNER_COLOURS = {"victim": "#CC79A7", "attacker": "#999999"}


def draw(report: Mapping[str, Any], path: Path) -> None:
    """Write the picture as PNG: the victim's hits over time, and who lost blocks to whom."""
    figure, (left, right) = plt.subplots(
        1, 2, figsize=(12, 5), width_ratios=(5, 3), layout="constrained"
    )
    figure.suptitle(_message(report), fontsize=14, fontweight="bold")
    _draw_hits(left, report)
    _draw_evictions(right, report)
    for axes in (left, right):
        axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, dpi=150)
    plt.close(figure)


def _message(report: Mapping[str, Any]) -> str:
    shares = [
        f"{data['groups']['victim']['hit_ratio'] or 0:.0%} with {POLICY_TITLES[policy]}"
        for policy, data in report["policies"].items()
    ]
    return f"Under attack the victim's prefix-cache hit ratio is {', '.join(shares)}"


def _draw_hits(axes: Axes, report: Mapping[str, Any]) -> None:
    first_measured = 0
    for policy, data in report["policies"].items():
        requests = data["victim_requests"]
        first_measured = sum(not request["measured"] for request in requests)
        ratios = [
            float("nan") if request["hit_ratio"] is None else 100 * request["hit_ratio"]
            for request in requests
        ]
        axes.plot(
            range(1, len(ratios) + 1),
            ratios,
            color=POLICY_COLOURS[policy],
            marker="o",
            markersize=3,
            linewidth=1.5,
            label=POLICY_TITLES[policy],
        )
        axes.annotate(
            POLICY_TITLES[policy],
            (len(ratios), ratios[-1]),
            xytext=(0, -18 if ratios[-1] > 50 else 10),
            textcoords="offset points",
            ha="right",
            color=POLICY_COLOURS[policy],
            fontweight="bold",
        )
    axes.axvspan(0.5, first_measured + 0.5, color="0.92", zorder=0)
    axes.axvline(first_measured + 0.5, color="0.4", linewidth=1)
    axes.text(2.2, 50, "warm-up", rotation=90, ha="center", va="center", color="0.3")
    axes.text(first_measured + 1.5, 106, "under attack", va="center", color="0.3")
    axes.set(
        title="The victim's requests",
        xlabel="request number",
        ylabel="share of the prompt found in the cache (%)",
        xlim=(0.5, None),
        ylim=(-3, 112),
        yticks=range(0, 101, 20),
    )


def _draw_evictions(axes: Axes, report: Mapping[str, Any]) -> None:
    policies = list(report["policies"])
    bars = [(policy, causer) for policy in policies for causer in TENANTS]
    places = [1.4 * index + index // len(TENANTS) for index in range(len(bars))]
    tops = [0] * len(bars)
    for owner, colour in OWNER_COLOURS.items():
        blocks = [_blocks(report, policy, owner, causer) for policy, causer in bars]
        drawn = axes.bar(places, blocks, bottom=tops, color=colour, label=f"of the {owner}")
        tops = [top + count for top, count in zip(tops, blocks, strict=True)]
        highest = max(tops, default=0)
        labels = [f"{count:,}" if count > highest / 20 else "" for count in blocks]
        axes.bar_label(drawn, labels, label_type="center")
    for place, top in zip(places, tops, strict=True):
        if 0 < top < max(tops) / 20:
            axes.text(place, top, f"{top:,}", ha="center", va="bottom")
    axes.set_xticks(places, [f"by the\n{causer}" for _, causer in bars])
    for index, policy in enumerate(policies):
        middle = sum(places[2 * index : 2 * index + 2]) / 2
        axes.text(
            middle,
            -0.17,
            POLICY_TITLES[policy],
            transform=axes.get_xaxis_transform(),
            ha="center",
            va="top",
            color=POLICY_COLOURS[policy],
            fontweight="bold",
        )
    axes.set(title="Cached blocks evicted", ylabel="blocks of 32 tokens")
    axes.set_ylim(0, max([*tops, 1]) * 1.2)
    axes.legend(loc="upper right", frameon=False, ncols=2)


def _blocks(report: Mapping[str, Any], policy: str, owner: str, causer: str) -> int:
    rows = report["policies"][policy]["evictions"]
    wanted = (owner, causer)
    return sum(row["blocks"] for row in rows if (row["owner"], row["causer"]) == wanted)
