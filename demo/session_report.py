"""The session's findings as a page of Markdown, from the JSON alone."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from prefixshield.evaluation.markdown import table


def summary(found: Mapping[str, Any]) -> str:
    """The page."""
    alone, attack = found["alone"], found["attack"]
    reload, replay, calibrate = found["reload"], found["replay"], found["calibrate"]
    rules = found["rules"]
    debts = attack["debt_blocks"]["attacker"]
    fell_pp = _points(attack, alone)
    parts = [
        f"# {found['title']}",
        f"`{found['command']}`, {found['seconds']} s, commit {found['commit']}, "
        f"Python {found['python']}, {found['machine']}. Figures are of `/metrics`. "
        "Each step ends the session with an error if it does not see what it says here; "
        "all figures: [summary.json](summary.json).",
        "## 1. The victim alone",
        f"Hit ratio {_percent(alone['hit_ratio']['victim'])} over {alone['requests']} requests, "
        "after a warm-up. Every request is recorded from the start.",
        "## 2. The attack",
        "The attacker sends prompts that nobody has seen, each twice. "
        f"In {attack['seconds']:.0f} s it creates "
        f"{attack['created_blocks']['attacker']:,} blocks and comes to owe {debts[-1][1]:,.0f} "
        f"(required: {rules['attacker_owes_at_least_of_created']:.0%} of them). The victim's hit "
        f"ratio is {_percent(attack['hit_ratio']['victim'])}, {fell_pp:.1f} points below step 1 "
        f"(allowed: {rules['victim_holds_within_pp']:g}); it loses "
        f"{attack['victim_lost_to_attacker']:,} blocks to the attacker.",
        table(
            ("seconds", "attacker owes, blocks", "victim owes, blocks"),
            [
                (f"{seconds:.0f}", f"{debt:,.0f}", f"{victim:,.0f}")
                for (seconds, debt), (_, victim) in zip(
                    debts, attack["debt_blocks"]["victim"], strict=True
                )
            ],
            names=0,
        ),
        "`prefixshield top URL --once`, during the attack:",
        _verbatim(attack["top"]),
        *_page(attack["page_debt_blocks"]),
        "## 3. The contract is changed while the server runs",
        f"The attacker's `refill_rate` goes from {reload['refill_rate']['before']:g} to "
        f"{reload['refill_rate']['after']:g} blocks/s in the file. One version is counted as "
        f"accepted; the debt stays ({reload['debt_blocks']['before']:,.0f} blocks before, "
        f"{reload['debt_blocks']['after']:,.0f} after, readings "
        f"{reload['seconds_between']:.1f} s apart) and then falls by "
        f"{reload['debt_falls_by']['after']:.1f} blocks/s, where it fell by "
        f"{reload['debt_falls_by']['before']:.1f} (allowed: {rules['slope_within']:.0%} off).",
        "## 4. The recording, replayed",
        f"{replay['requests']} requests, serially, with the demo's contracts; ratios in blocks.",
        table(
            ("policy", "victim hits", "attacker hits", "victim's blocks lost to the attacker"),
            [
                (
                    row["policy"],
                    _percent(row["victim"]),
                    _percent(row["attacker"]),
                    f"{row['victim_lost_to_attacker']:,}",
                )
                for row in replay["rows"]
            ],
            names=1,
        ),
        "S3-FIFO asks for a second use, as the attacker's blocks have it, and knows no debts.",
        "## 5. A horizon that is too short",
        f"`prefixshield calibrate --horizon {found['short_horizon_s']:g}` on the recording:",
        _verbatim(calibrate[0]["output"]),
        "The file is put in force all the same, without a restart, and the attacker, which owes "
        "nothing by then, sends as many prompts as in step 2. The effect is in the table of step "
        "6.",
        "## 6. The proposal",
        "The same without `--horizon`: several are tried.",
        _verbatim(calibrate[1]["output"]),
        "The victim's prefixes are the same in all three attacks; the attacker's prompts are new. "
        "The cache and the policy's memory are those of the steps before.",
        table(
            ("", "demo's contracts", f"horizon {found['short_horizon_s']:g} s", "proposed"),
            list(_effect([found, *calibrate])),
            names=1,
        ),
    ]
    return "\n\n".join(parts) + "\n"


def _effect(runs: Sequence[Mapping[str, Any]]) -> Iterable[Sequence[str]]:
    """Rows: a figure of each run's attack."""
    attacks = [run["attack"] for run in runs]
    yield (
        "victim's hit ratio under attack",
        *(_percent(attack["hit_ratio"]["victim"]) for attack in attacks),
    )
    yield (
        "against step 2, points",
        *(f"{_points(attacks[0], attack):+.1f}" for attack in attacks),
    )
    yield (
        "victim's blocks lost to the attacker",
        *(f"{attack['victim_lost_to_attacker']:,}" for attack in attacks),
    )
    yield "attacker's hit ratio", *(_percent(attack["hit_ratio"]["attacker"]) for attack in attacks)
    yield "attacker's first debt after, s", *(_first_debt(attack) for attack in attacks)
    yield (
        "attacker's debt at the end, blocks",
        *(f"{attack['debt_blocks']['attacker'][-1][1]:,.0f}" for attack in attacks),
    )


def _first_debt(attack: Mapping[str, Any]) -> str:
    owing = [seconds for seconds, debt in attack["debt_blocks"]["attacker"] if debt > 0]
    return f"{owing[0]:.0f}" if owing else "never"


def _page(debts: Mapping[str, float] | None) -> list[str]:
    if debts is None:
        return ["The live page was served to the operator's key alone; there was no Chromium."]
    return [
        "The live page, in Chromium, served to the operator's key alone: the attacker owes "
        f"{debts['earlier']:,.0f} blocks, some seconds later {debts['later']:,.0f}.",
        "![The live page during the attack](page.png)",
    ]


def _verbatim(text: str) -> str:
    lines = (line.rstrip() for line in text.rstrip().splitlines())
    return "\n".join(("```", *lines, "```"))


def _points(before: Mapping[str, Any], after: Mapping[str, Any]) -> float:
    """What the victim's hit ratio gained, in points of a hundred, never -0.0."""
    gained: float = after["hit_ratio"]["victim"] - before["hit_ratio"]["victim"]
    return round(100 * gained, 1) + 0.0


def _percent(ratio: float) -> str:
    return f"{ratio:.1%}"
