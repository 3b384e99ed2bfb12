"""``python -m demo.session``: an operator's session on the real server, from attack to contracts.

Six steps. Each checks what it says it saw; the first thing that is not seen ends the session with
one message and status 1. Written: ``results/session/``.
"""

from __future__ import annotations

import base64
import json
import os
import shutil
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

from demo.browser import Browser, find_chromium
from demo.phases import (
    Phase,
    Sending,
    SessionError,
    Traffic,
    hit_ratio_of_blocks,
    line,
    slope,
)
from demo.server import FOLDER, LOG_FOLDER, MODEL_FOLDER, POOL_BLOCKS, TENANTS_FILE, build_command
from demo.session_report import summary
from demo.tenants import load_keys
from demo.traffic import BLOCK_SIZE_TOKENS, TENANTS, Outcome
from prefixshield.config import Config, RecordSection, dump_config, load_config, operator_key
from prefixshield.errors import PrefixShieldError
from prefixshield.evaluation.results import provenance, replace_files
from prefixshield.serving.child_server import ChildServer, interrupt_by_signals
from prefixshield.serving.routes import PAGE_PATH
from prefixshield.serving.tiny_model import write_tiny_model
from prefixshield.serving.wiring import OPERATOR_KEY_VARIABLE
from prefixshield.top import Snapshot, fetch
from prefixshield.traces import read_trace

ROOT = FOLDER.parent
RUN_FOLDER = LOG_FOLDER / "session"
RESULTS_FOLDER = ROOT / "results" / "session"
SEED = 7

#: Rounds of the victim's four prefixes, 1.6 s each.
WARMUP_ROUNDS, ALONE_ROUNDS, ATTACK_ROUNDS = 2, 6, 14
DEBT_ROUNDS, FORGIVING_ROUNDS, RELOAD_ROUNDS = 6, 9, 3

#: The victim's hit ratio holds when it falls by no more than this, in points of a hundred.
HOLDS_WITHIN_PP = 5.0
#: What the attacker owes at the end of the attack, at least, as a share of what it created.
OWES_AT_LEAST = 0.5
#: Blocks/s, in place of the 8 of the demo's file: clears the debt within seconds.
FORGIVING_RATE = 200.0
#: Seconds for which a block is to live, in the first proposal: too short to hold the victim.
SHORT_HORIZON_S = 1.0
MOST_PAYING_PHASES = 20
#: A debt falls as its contract says when its slope is this close; gauges are up to a second old.
SLOPE_WITHIN = 0.2

POLICIES = (("lru", None), ("s3fifo", None), ("shield", "paper"), ("shield", "default"))

#: The page's table of groups, row by row.
_ROWS = "[...document.querySelectorAll('#groups tr')].map(r => [...r.cells].map(c => c.innerText))"


def main() -> int:
    """Run the session and return its exit status."""
    interrupt_by_signals()
    try:
        _run()
    except PrefixShieldError as error:
        print(f"session: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # one message is enough
        print("session: interrupted; no server is left running", file=sys.stderr)
        return 130
    return 0


def _run() -> None:
    started, made_on = time.monotonic(), provenance()
    shutil.rmtree(RUN_FOLDER, ignore_errors=True)
    RUN_FOLDER.mkdir(parents=True)
    write_tiny_model(MODEL_FOLDER)
    with Session() as session:
        found = session.run()
    found = {
        "title": "An operator's session on the real server",
        "command": "make session",
        **made_on,
        "seconds": round(time.monotonic() - started),
        **found,
    }
    texts = {"summary.json": json.dumps(found, indent=2) + "\n", "summary.md": summary(found)}
    replace_files(RESULTS_FOLDER, texts)
    (RESULTS_FOLDER / "page.png").unlink(missing_ok=True)
    if found["attack"]["page_debt_blocks"] is not None:
        shutil.copy(RUN_FOLDER / "page.png", RESULTS_FOLDER)
    print(f"\nAll seen, in {found['seconds']} s. Written: {_relative(RESULTS_FOLDER)}/summary.md")


class Session:
    """One server, its configuration file, and what the operator does with both."""

    def __init__(self) -> None:
        self._file = RUN_FOLDER / "tenants.yaml"
        self._recording = RUN_FOLDER / "requests.jsonl"
        self._demo = load_config(TENANTS_FILE)
        record = RecordSection(path=str(self._recording))
        self._recorded = self._demo.model_copy(update={"record": record})
        self._put(dump_config(self._recorded))
        self._operator = operator_key(self._demo, TENANTS_FILE) or ""
        os.environ[OPERATOR_KEY_VARIABLE] = self._operator  # of `top`, as an operator sets it
        self._keys = load_keys()
        self._traffic = Traffic(SEED)
        command = build_command("shield", [], tenants=self._file)
        self._server = ChildServer(command, log=RUN_FOLDER / "server.log")
        self._outcomes: list[Outcome] = []

    def __enter__(self) -> Session:
        self._server.__enter__()
        return self

    def __exit__(self, *_: object) -> None:
        self._server.stop()

    def run(self) -> dict[str, Any]:
        """All steps; returns what they found."""
        _say("1. The server starts, recording; the victim is alone")
        self._server.wait_until_healthy()
        with self._browser() as browser:
            self._send(WARMUP_ROUNDS)
            alone = self._send(ALONE_ROUNDS)
            _expect(alone.hit_ratio("victim") > 0.5, "the victim's prefixes are not cached")
            _say("2. The attacker floods")
            attack, seen = self._attacked(alone, browser)
        _say(f"3. The attacker's contract is changed in the file: {FORGIVING_RATE:g} blocks/s")
        reload = self._reload_contract()
        _say("4. The recording ends, and is replayed under four policies")
        replay = self._replay_recording()
        _say(f"5. Contracts for a horizon of {SHORT_HORIZON_S:g} s, put in force; the same attack")
        calibrate = [self._calibrate("short", "--horizon", f"{SHORT_HORIZON_S:g}")]
        _expect("Warning" in calibrate[0]["output"], "calibrate does not warn")
        _say("6. Contracts as calibrate proposes them by itself; the same attack")
        calibrate.append(self._calibrate("proposed"))
        self._expect_no_more_recorded(replay["requests"])
        return {
            "rules": {
                "victim_holds_within_pp": HOLDS_WITHIN_PP,
                "attacker_owes_at_least_of_created": OWES_AT_LEAST,
                "slope_within": SLOPE_WITHIN,
            },
            "alone": _numbers(alone),
            "attack": {**_numbers(attack), **seen},
            "reload": reload,
            "replay": replay,
            "short_horizon_s": SHORT_HORIZON_S,
            "calibrate": calibrate,
        }

    def _attacked(self, alone: Phase, browser: Browser | None) -> tuple[Phase, dict[str, Any]]:
        sending = self._start(ATTACK_ROUNDS, attack=True)
        sending.read(6)
        earlier = _debt_on(browser)
        sending.read(10)
        top = self._command("top", self._server.base_url, "--once")
        _expect("attacker" in top and "victim" in top, "`top` does not show both groups")
        self._look_at_page()
        later = _debt_on(browser)
        if browser is not None:
            browser.screenshot(RUN_FOLDER / "page.png")
            print(f"  the page in Chromium: the attacker owes {earlier:,.0f}, then {later:,.0f}")
            _expect(0 < earlier < later, "the page does not show the attacker's debt rise")
        phase = self._finish(sending)
        created = phase.grown("materialised", "attacker")
        debts = [debt for _, debt in phase.debts("attacker")]
        _expect(
            debts[0] == 0 and debts[-1] == max(debts) >= OWES_AT_LEAST * created,
            f"the attacker created {created:.0f} blocks and owes {debts[-1]:.0f} after "
            f"{debts[0]:.0f}, expected a debt that rises to half of what it created",
        )
        lost_pp = 100 * (alone.hit_ratio("victim") - phase.hit_ratio("victim"))
        _expect(
            lost_pp <= HOLDS_WITHIN_PP,
            f"the victim's hit ratio fell by {lost_pp:.1f} points, expected {HOLDS_WITHIN_PP:g} "
            "at most",
        )
        drawn = None if browser is None else {"earlier": earlier, "later": later}
        return phase, {"top": top, "page_debt_blocks": drawn}

    def _reload_contract(self) -> dict[str, Any]:
        contract = self._demo.groups["attacker"].contract
        terms = self._demo.contracts[contract]
        forgiving = terms.model_copy(update={"refill_rate": FORGIVING_RATE})
        contracts = {**self._demo.contracts, contract: forgiving}
        before = self._send(DEBT_ROUNDS)
        print("  the new version is written")
        self._put(dump_config(self._recorded.model_copy(update={"contracts": contracts})))
        after = self._send(FORGIVING_ROUNDS)
        place = _accepted_at(after)
        debts = after.debts("attacker")
        (was_s, was), (now_s, now) = debts[place - 1], debts[place]
        _expect(
            was >= now >= was - FORGIVING_RATE * (now_s - was_s + 2),
            f"the attacker owed {was:.0f} blocks before the reload and {now:.0f} after it, "
            "expected a balance that is kept and then falls",
        )
        owing = [point for point in debts[place:] if point[1] > 0]
        rates = {
            "before": (terms.refill_rate, -slope(before.debts("attacker"))),
            "after": (FORGIVING_RATE, -slope(owing)),
        }
        for when, (agreed, found) in rates.items():
            print(f"  {when} the reload the debt falls by {found:.1f} blocks/s, agreed {agreed:g}")
            _expect(
                abs(found / agreed - 1) <= SLOPE_WITHIN,
                f"{when} the reload the debt fell by {found:.1f} blocks/s, the contract says "
                f"{agreed:g}",
            )
        _expect(debts[-1][1] == 0, f"the attacker still owes {debts[-1][1]:.0f} blocks")
        return {
            "accepted": 1,
            "debt_blocks": {"before": round(was, 1), "after": round(now, 1)},
            "seconds_between": round(now_s - was_s, 2),
            "refill_rate": {when: agreed for when, (agreed, _) in rates.items()},
            "debt_falls_by": {when: round(found, 2) for when, (_, found) in rates.items()},
        }

    def _replay_recording(self) -> dict[str, Any]:
        (RUN_FOLDER / "demo.yaml").write_text(dump_config(self._demo), encoding="utf-8")
        self._put(dump_config(self._demo))
        phase = self._send(RELOAD_ROUNDS)
        _accepted_at(phase)
        requests = len(read_trace(self._recording, BLOCK_SIZE_TOKENS))
        sent = len(self._outcomes)
        written = phase.readings[-1].values["recorded"]["written",]
        _expect(
            sent - len(phase.outcomes) <= requests == written <= sent,
            f"the recording has {requests} requests and the metrics count {written:.0f} of {sent}",
        )
        # Only the victim is at work while the recording ends, one request after the other.
        served = self._outcomes[:requests]
        rows: list[dict[str, Any]] = [
            {
                "policy": "on the server",
                **{
                    tenant: round(hit_ratio_of_blocks(served, tenant, BLOCK_SIZE_TOKENS), 4)
                    for tenant in TENANTS
                },
                "victim_lost_to_attacker": round(
                    phase.readings[-1].values["evicted"]["victim", "attacker"]
                ),
            }
        ]
        for policy, preset in POLICIES:
            options = ["--policy", policy, *(("--preset", preset) if preset else ())]
            options += ["--blocks", str(POOL_BLOCKS), "--block-size", str(BLOCK_SIZE_TOKENS)]
            options += ["--config", _relative(self._file), "--json"]
            text = self._command("replay", _relative(self._recording), *options, show=False)
            result = json.loads(text)
            name = f"{policy} {preset}" if preset else policy
            _expect(
                (result["requests"], result["rejected"]) == (requests, 0),
                f"the replay under {name} took {result['requests']} of {requests} requests",
            )
            rows.append(
                {
                    "policy": name,
                    **{tenant: result["groups"][tenant]["hit_ratio"] for tenant in TENANTS},
                    "victim_lost_to_attacker": sum(
                        row["blocks"]
                        for row in result["evictions"]
                        if (row["owner"], row["causer"]) == ("victim", "attacker")
                    ),
                }
            )
        for row in rows:
            print(
                f"  {row['policy']:<15} victim hits {row['victim']:6.1%}, "
                f"attacker {row['attacker']:6.1%}; the victim lost "
                f"{row['victim_lost_to_attacker']:,} blocks to the attacker"
            )
        victims = {row["policy"]: row["victim"] for row in rows}
        _expect(
            victims["shield default"] > victims["lru"],
            "the replay under shield is no better for the victim than under lru",
        )
        return {"requests": requests, "rows": rows}

    def _calibrate(self, name: str, *horizon: str) -> dict[str, Any]:
        """A proposal, put in force, and the attack of before under it, by one who owes nothing."""
        proposed_file = RUN_FOLDER / f"{name}.yaml"
        options = ["--blocks", str(POOL_BLOCKS), "--block-size", str(BLOCK_SIZE_TOKENS)]
        options += ["--config", _relative(RUN_FOLDER / "demo.yaml")]
        options += ["--output", _relative(proposed_file), *horizon]
        text = self._command("calibrate", _relative(self._recording), *options)
        proposed = load_config(proposed_file)
        _expect(
            proposed == self._demo.model_copy(update={"contracts": proposed.contracts}),
            f"{_relative(proposed_file)}: found other changes than of contracts",
        )
        before = load_config(self._file).contracts
        _expect(proposed.contracts != before, "calibrate proposes what is in force")
        self._until_paid()
        self._put(proposed_file.read_text(encoding="utf-8"))
        _accepted_at(self._send(RELOAD_ROUNDS))
        attack = self._send(ATTACK_ROUNDS, attack=True)
        _expect(
            attack.readings[0].by("debt")["attacker"] == 0,
            "the attacker owed something before the attack",
        )
        return {"output": text, "contracts": _terms(proposed), "attack": _numbers(attack)}

    def _expect_no_more_recorded(self, requests: int) -> None:
        written = fetch(self._server.base_url).values["recorded"]["written",]
        _expect(
            written == requests == len(read_trace(self._recording, BLOCK_SIZE_TOKENS)),
            f"{written} requests were recorded, expected none after the first {requests}",
        )

    def _until_paid(self) -> None:
        """The victim goes on alone until the attacker owes nothing."""
        for _ in range(MOST_PAYING_PHASES):
            if self._send(RELOAD_ROUNDS).readings[-1].by("debt")["attacker"] == 0:
                return
        raise SessionError("the attacker's debt does not come to an end")

    def _look_at_page(self) -> None:
        """The operator's key opens the page, a tenant's does not."""
        url = f"{self._server.base_url}{PAGE_PATH}"
        _expect(_status(url, self._operator) == 200, f"{url}: the operator's key does not open it")
        _expect(_status(url, self._keys["victim"]) == 401, f"{url}: a tenant's key opens it")

    def _browser(self) -> AbstractContextManager[Browser | None]:
        chromium = find_chromium()
        if chromium is None:
            print("  no Chromium on the PATH: the page is fetched, not drawn")
            return nullcontext()
        address = self._server.base_url.removeprefix("http://")
        return Browser(chromium, f"http://operator:{self._operator}@{address}{PAGE_PATH}")

    def _put(self, text: str) -> None:
        """Another version of the file, moved into its place."""
        new = self._file.with_suffix(".new")
        new.write_text(text, encoding="utf-8")
        new.rename(self._file)

    def _start(self, rounds: int, *, attack: bool = False) -> Sending:
        plan = self._traffic.rounds(rounds, attack=attack)
        return Sending(plan, self._server.base_url, self._keys, _show)

    def _finish(self, sending: Sending) -> Phase:
        phase = sending.finish()
        self._outcomes += phase.outcomes
        return phase

    def _send(self, rounds: int, *, attack: bool = False) -> Phase:
        return self._finish(self._start(rounds, attack=attack))

    def _command(self, *arguments: str, show: bool = True) -> str:
        """What a ``prefixshield`` command prints."""
        print(f"  $ prefixshield {' '.join(arguments)}", flush=True)
        script = Path(sys.executable).with_name("prefixshield")
        done = subprocess.run([script, *arguments], cwd=ROOT, capture_output=True, text=True)
        _expect(done.returncode == 0, f"prefixshield {arguments[0]}: {done.stderr.strip()}")
        if show:
            print(*(f"    {text}" for text in done.stdout.splitlines()), sep="\n", flush=True)
        return done.stdout


def _numbers(phase: Phase) -> dict[str, Any]:
    """A phase's figures, from ``/metrics`` but for the clients' TTFT."""
    lost = {
        cause: round(phase.grown("lost", "victim", cause)) for cause in ("debt", "order", "orphan")
    }
    return {
        "seconds": round(phase.readings[-1].time - phase.readings[0].time, 1),
        "requests": len(phase.outcomes),
        "hit_ratio": {tenant: round(phase.hit_ratio(tenant), 4) for tenant in TENANTS},
        "created_blocks": {
            tenant: round(phase.grown("materialised", tenant)) for tenant in TENANTS
        },
        "victim_lost_to_attacker": round(phase.grown("evicted", "victim", "attacker")),
        "victim_lost_by_cause": lost,
        "ttft_p50_ms": {tenant: phase.ttft_p50_ms(tenant) for tenant in TENANTS},
        "debt_blocks": {
            tenant: [[round(s, 1), round(debt, 1)] for s, debt in phase.debts(tenant)]
            for tenant in TENANTS
        },
    }


def _accepted_at(phase: Phase) -> int:
    """The first reading with one more accepted version of the file than when the phase began."""
    counts = [reading.values["reloads"] for reading in phase.readings]
    accepted = [count["accepted",] - counts[0]["accepted",] for count in counts]
    refused = counts[-1]["refused",] - counts[0]["refused",]
    _expect(
        (accepted[-1], refused) == (1, 0),
        f"the metrics count {accepted[-1]:.0f} accepted and {refused:.0f} refused versions of the "
        "file, expected one accepted",
    )
    print("  the new version of the file is in force")
    return accepted.index(1)


def _debt_on(browser: Browser | None) -> float:
    """What the live page says that the attacker owes; 0 without a browser."""
    if browser is None:
        return 0.0
    rows: Sequence[Sequence[str]] = browser.evaluate(_ROWS) or ()
    shown = [row[3].replace(",", "") for row in rows if row and row[0].strip() == "attacker"]
    _expect(len(shown) == 1, "the page shows no row of the attacker")
    return float(shown[0])


def _status(url: str, password: str) -> int:
    request = urllib.request.Request(url)
    credentials = base64.b64encode(f"operator:{password}".encode()).decode()
    request.add_header("Authorization", f"Basic {credentials}")
    try:
        with urllib.request.urlopen(request, timeout=10) as response:
            return int(response.status)
    except urllib.error.HTTPError as error:
        return error.code


def _terms(config: Config) -> dict[str, Any]:
    return {name: terms.model_dump() for name, terms in config.contracts.items()}


def _relative(path: Path) -> str:
    return str(path.relative_to(ROOT))


def _show(first: Snapshot, now: Snapshot) -> None:
    print(f"  {line(first, now)}", flush=True)


def _say(text: str) -> None:
    print(f"\n{text}", flush=True)


def _expect(seen: bool, otherwise: str) -> None:
    if not seen:
        raise SessionError(otherwise)


if __name__ == "__main__":
    sys.exit(main())
