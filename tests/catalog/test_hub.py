"""Hub ids: what is said where the hub is off, away, or has no such model; and a config from a hub of our own on loopback."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from explorer.catalog import find_model, hub
from explorer.errors import BadInput, CouldNotRun
from explorer.measure import client
from tests.catalog.tiny import TINY

FILES_CONFIG = {**TINY["Llama"], "architectures": ["LlamaForCausalLM"], "torch_dtype": "bfloat16"}
FILES = {
    "org/tiny": (200, json.dumps(FILES_CONFIG), ""),
    "org/own-code": (200, json.dumps({"model_type": "ours", "auto_map": {"AutoConfig": "configuration_ours.OursConfig"}}), ""),
    "org/gated": (403, "", "GatedRepo"),
    "org/missing": (404, "", "RepoNotFound"),
    "org/weights-only": (404, "", "EntryNotFound"),
}


class _Hub(BaseHTTPRequestHandler):
    """As much of a hub as `AutoConfig` asks for."""

    asked: list[str] = []

    def do_HEAD(self):
        self._answer(body=False)

    def do_GET(self):
        self._answer(body=True)

    def _answer(self, body):
        self.asked.append(self.path)
        name = "/".join(self.path.strip("/").split("/")[:2])
        status, text, error = FILES.get(name, (404, "", "RepoNotFound"))
        if status == 200 and not self.path.endswith("/config.json"):
            status, text, error = 404, "", "EntryNotFound"
        self.send_response(status)
        self.send_header("Content-Length", str(len(text)))
        self.send_header("X-Repo-Commit", "0123456789abcdef0123456789abcdef01234567")
        if status == 200:
            self.send_header("ETag", f'"{name.replace("/", "-")}"')
        if error:
            self.send_header("X-Error-Code", error)
        self.end_headers()
        if body:
            self.wfile.write(text.encode())

    def log_message(self, *arguments):
        pass


@pytest.fixture(scope="module")
def server():
    httpd = ThreadingHTTPServer(("127.0.0.1", 0), _Hub)
    threading.Thread(target=httpd.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{httpd.server_port}"
    httpd.shutdown()
    httpd.server_close()


@pytest.fixture
def away(monkeypatch, tmp_path):
    """A hub where nothing listens, and an empty cache."""
    for name in ("HF_HUB_OFFLINE", "HF_HUB_CACHE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HF_HOME", str(tmp_path))
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:1")


ASK = """
import json, sys
from explorer.errors import BadInput, CouldNotRun
from explorer.workload import hub_config
for name in sys.argv[1:]:
    try:
        answer = hub_config({"name": name}, print)
    except (BadInput, CouldNotRun) as error:
        answer = {"error": str(error), "kind": type(error).__name__}
    print(json.dumps(answer), flush=True)
"""


@pytest.fixture(scope="module")
def answers(server, tmp_path_factory):
    """name → what the worker's function says of it, the first one asked twice; "home" → its cache."""
    pytest.importorskip("transformers")
    home = str(tmp_path_factory.mktemp("hub"))
    names = [*FILES, "org/tiny"]
    env = {**os.environ, "HF_ENDPOINT": server, "HF_HOME": home, "HF_HUB_OFFLINE": "0", "HF_TOKEN": "", "NO_PROXY": "127.0.0.1"}
    done = subprocess.run([sys.executable, "-c", ASK, *names], capture_output=True, text=True, timeout=120, check=False, env=env)
    assert done.returncode == 0, done.stderr
    *once, again = map(json.loads, done.stdout.splitlines())
    return {**dict(zip(FILES, once, strict=True)), "again": again, "home": home}


def test_a_config_from_the_hub(answers):
    config = answers["org/tiny"]["config"]
    assert (config["model_type"], config["hidden_size"], config["num_hidden_layers"]) == ("llama", 32, 2)


@pytest.mark.parametrize(("name", "words"), [("org/gated", "gated"), ("org/missing", "not on the Hugging Face hub"), ("org/weights-only", "no config.json"), ("org/own-code", "never done here")])
def test_each_refusal_has_its_cause(answers, name, words):
    assert answers[name]["kind"] == "BadInput"
    assert words in answers[name]["error"] and "\n" not in answers[name]["error"]


def test_what_was_fetched_once_needs_no_hub(answers, away, monkeypatch):
    assert answers["again"] == answers["org/tiny"]
    assert _Hub.asked and "tiny" not in _Hub.asked[-1]
    monkeypatch.setenv("HF_HOME", answers["home"])
    assert find_model("org/tiny").key == find_model(FILES_CONFIG).key
    assert hub.stored_config("org/tiny") and hub.stored_config("org/missing") is None


def test_the_model_of_a_hub_config(answers, server, away, monkeypatch):
    monkeypatch.setenv("HF_ENDPOINT", server)
    asked = []

    def run_in_worker(function, argument, **options):
        asked.append((function, argument))
        return answers[argument["name"]]

    monkeypatch.setattr(client, "run_in_worker", run_in_worker)
    hub._asked.cache_clear()
    models = [find_model("org/tiny") for _ in range(3)]
    assert asked == [("explorer.workload:hub_config", {"name": "org/tiny"})]  # asked once
    assert (models[0].name, models[0].source, models[0].model_class, models[0].hidden_size) == ("org/tiny", "hub", "LlamaForCausalLM", 32)
    hub._asked.cache_clear()


@pytest.mark.parametrize(("error", "words"), [(BadInput("model", "'a/b' is a gated model"), "gated model"), (CouldNotRun("a real step needs torch"), "a real step needs torch")])
def test_a_failure_in_the_worker_is_told_with_a_way_out(server, away, monkeypatch, error, words):
    def run_in_worker(*_, **__):
        raise error

    monkeypatch.setenv("HF_ENDPOINT", server)
    monkeypatch.setattr(client, "run_in_worker", run_in_worker)
    with pytest.raises(BadInput) as caught:
        find_model("org/failing")
    assert caught.value.field == "model"
    assert words in str(caught.value) and "paste its config.json" in str(caught.value)


def test_a_hub_that_is_away_is_one_sentence_at_once(away, monkeypatch):
    monkeypatch.setattr(client, "run_in_worker", lambda *_, **__: pytest.fail("nothing to ask"))
    started = time.monotonic()
    with pytest.raises(BadInput, match="cannot be reached; paste its config.json, or choose .*Llama-3.2-1B"):
        find_model("meta-llama/Llama-3.2-1C")
    assert time.monotonic() - started < hub.REACH_SECONDS + 1


def test_a_hub_that_never_answers_is_given_up(away, monkeypatch):
    import socket

    monkeypatch.setattr(hub, "REACH_SECONDS", 0.3)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        monkeypatch.setenv("HF_ENDPOINT", f"http://127.0.0.1:{silent.getsockname()[1]}")
        started = time.monotonic()
        with pytest.raises(BadInput, match="cannot be reached"):
            find_model("org/tiny")
        assert time.monotonic() - started < 2


@pytest.mark.parametrize(("value", "expected"), [("1", True), ("true", True), ("ON", True), ("0", False), ("", False), ("no", False)])
def test_offline_as_the_hub_reads_it(monkeypatch, value, expected):
    monkeypatch.setenv("HF_HUB_OFFLINE", value)
    assert hub.offline() is expected


def test_switched_off_is_one_sentence_with_a_way_out(away, monkeypatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setattr(client, "run_in_worker", lambda *_, **__: pytest.fail("nothing to ask"))
    with pytest.raises(BadInput, match="switched off .* paste its config.json, or choose .*gpt2-large"):
        find_model("gpt2-larger")


@pytest.mark.parametrize("name", ["{}", "a/b/c", "x" * 300, "two\nlines", "<script>", "it's", "a b", "-x/y"])
def test_names_that_can_be_no_hub_id(away, name):
    with pytest.raises(BadInput, match="neither a catalog name") as caught:
        find_model(name)
    assert caught.value.field == "model" and len(str(caught.value)) < 400
