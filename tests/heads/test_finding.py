"""Heads that nobody named: beside a model, in it, or in a repository of the same owner, checked before anything else is downloaded."""

import json
import os
import shutil
import subprocess
import sys
import warnings
from collections import Counter
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from typing import Any, ClassVar
from urllib.parse import parse_qs, urlparse

import pytest

from polydraft import Engine, SamplingParams
from polydraft.errors import IncompatibleError, ModelLoadError
from polydraft.heads import finding
from polydraft.models.store.tensor_files import tensors_of
from tests.heads import oracle
from tests.models.test_companions import write_two_files

TINY_FILE = Path(__file__).parents[1] / "models" / "oracle_gguf" / "granite.gguf"
GREEDY = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)


@pytest.fixture
def beside(tmp_path):
    return heads_beside(tmp_path)


def heads_beside(place):
    """A folder with the model, and a function that puts heads beside it."""
    shutil.copytree(oracle.target_folder(""), place / "tiny")

    def put(name, kind, **settings):
        shutil.copytree(oracle.folder(kind), place / name)
        said = json.loads((place / name / "config.json").read_text())
        (place / name / "config.json").write_text(json.dumps(said | settings))
        return place / name

    return place / "tiny", put


def engine_of(model, **options) -> tuple[Any, list[str]]:
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        engine = Engine.from_pretrained(model, depth=2, max_model_len=64, max_num_seqs=1, **options)
    return engine, [str(w.message) for w in said if "draft head" in str(w.message)]


@pytest.mark.parametrize(
    ("name", "kind", "drafter"),
    [("tiny-DSpark", "dspark-qwen3-gated", "block"), ("tiny-DFlash-b6", "dflash-jetspec-causal", "block"),
     ("tiny-speculator.eagle3", "speculators-eagle3-norm", "eagle"), ("TINY_mtp", "speculators-mtp", "mtp")],
)  # fmt: skip
def test_a_head_beside_a_model_that_is_called_like_it_drafts_and_one_line_says_so(
    beside, name, kind, drafter
):
    model, put = beside
    where = put(name, kind)
    engine, (line,) = engine_of(model)
    assert line.startswith(f"the draft head {str(where)!r} was found and drafts")
    assert engine.drafter.info.name == drafter
    found, plain = (e.generate([[5, 6, 7]], GREEDY)[0] for e in (engine, engine_of(model, drafter=None)[0]))
    assert found.token_ids == plain.token_ids and found.stats.drafted_tokens > 0


def test_a_head_that_names_the_model_is_found_and_others_are_left_alone(beside):
    model, put = beside
    put("tiny-instruct", "dspark-qwen3-gated")
    assert engine_of(model)[1] == []
    verifier = {"algorithm": "dspark", "verifier": {"name_or_path": "somebody/tiny"}}
    where = put("a-head", "speculators-dspark-inplace", speculators_config=verifier)
    _, (line,) = engine_of(model)
    assert f"{str(where)!r} was found and drafts" in line
    assert engine_of(model, drafter="ngram")[1] == []


def test_a_head_of_another_model_is_not_used_and_the_line_says_why(beside):
    model, put = beside
    put("tiny-DSpark", "dspark-qwen3-gated", num_target_layers=36)
    engine, (line,) = engine_of(model)
    assert "is not used: it is for num_target_layers=36, the model has 6" in line
    assert engine.drafter.info.name == "ngram"
    put("tiny-DSpark-b", "dspark-qwen3-gated", strange_field=3)
    assert any("strange_field=3 is not understood" in line for line in engine_of(model)[1])


def test_a_found_head_that_cannot_be_built_leaves_the_model_to_draft_as_without_it(beside, monkeypatch):
    model, put = beside
    put("tiny-mtp", "speculators-mtp")
    monkeypatch.setattr("polydraft.heads.mtp.network._norm_weight", lambda _: refuse())
    engine, lines = engine_of(model)
    assert engine.drafter.info.name == "ngram" and "cannot be used here: no norm" in lines[-1]


def refuse():
    raise IncompatibleError("no norm")


def test_a_named_head_of_another_model_is_refused_before_the_model_is_loaded(beside, monkeypatch):
    model, put = beside
    monkeypatch.setattr("polydraft.engine.api.load_models", lambda *_: pytest.fail("a model was loaded"))
    for i, (settings, reason) in enumerate(
        (({"num_target_layers": 36}, "num_target_layers=36, the model has 6"),
         ({"hidden_size": 128}, "its states have hidden_size=128 numbers, the model's 64"),
         ({"vocab_size": 100}, "it knows vocab_size=100 tokens, the model 320"))
    ):  # fmt: skip
        with pytest.raises(ModelLoadError, match=reason):
            engine_of(model, head=put(f"one{i}", "dspark-qwen3-gated", **settings))
    deep = put("four", "dspark-qwen3-gated", target_layer_ids=[0, 2, 9])
    with pytest.raises(
        ModelLoadError, match=r"reads the states of layers \[1, 3, 10\], of 6 layers 10 is none"
    ):
        engine_of(model, head=deep)
    with pytest.raises(ModelLoadError, match="it knows vocab_size=320 tokens, the model 512"):
        engine_of(TINY_FILE, head=put("five", "dspark-qwen3-gated"))
    other = put("three", "dspark-qwen3-gated")
    (other / "tokenizer.json").write_text(json.dumps({"model": {"vocab": {"a": 0}}}))
    with pytest.raises(ModelLoadError, match=r"has a tokenizer\.json with other tokens"):
        engine_of(model, head=other)
    with pytest.raises(ModelLoadError, match="strange_field=3 is not understood"):
        engine_of(model, head=put("two", "dspark-qwen3-gated", strange_field=3))


def test_a_head_is_opened_once_whether_it_is_named_or_found(beside, monkeypatch):
    model, put = beside
    where = put("tiny-DSpark", "dspark-qwen3-gated")
    reads = Counter()
    read_bytes = Path.read_bytes
    monkeypatch.setattr(Path, "read_bytes", lambda path: reads.update([path]) or read_bytes(path))
    monkeypatch.setattr(
        "polydraft.heads.checkpoint.tensors_of", lambda path: reads.update([path]) or tensors_of(path)
    )
    for options in ({}, {"head": where}):
        reads.clear()
        engine_of(model, **options)
        assert reads[where / "config.json"] == reads[where / "model.safetensors"] == 1


class Hub(BaseHTTPRequestHandler):
    """Repositories of the hub, each a folder; what is asked of them is noted."""

    folders: ClassVar[dict] = {}
    asked: ClassVar[list[str]] = []

    def do_HEAD(self):
        self.answer(body=False)

    def do_GET(self):
        self.answer(body=True)

    def answer(self, body):
        url = urlparse(self.path)
        parts = url.path.strip("/").split("/")
        if url.path == "/api/models":
            word = parse_qs(url.query)["search"][0]
            self.send([{"id": name, "modelId": name} for name in self.folders if word in name])
        elif parts[:2] == ["api", "models"] and "/".join(parts[2:4]) in self.folders:
            files = sorted(path for path in self.folders["/".join(parts[2:4])].iterdir())
            if "tree" in parts:
                self.send(
                    [{"type": "file", "path": f.name, "size": f.stat().st_size, "oid": "1"} for f in files]
                )
            else:
                told = {
                    "id": "/".join(parts[2:4]),
                    "sha": 40 * "1",
                    "siblings": [{"rfilename": f.name} for f in files],
                }
                self.send(told)
        elif (
            len(parts) == 5
            and parts[2] == "resolve"
            and (file := self.folders.get("/".join(parts[:2]), oracle.KEPT) / parts[4]).is_file()
        ):
            data = file.read_bytes()
            asked = "/".join([*parts[:2], parts[4]])
            if body and self.headers["Range"]:
                self.asked.append(f"the header of {asked}")
                self.send(data, 206, {"Content-Range": f"bytes 0-{len(data) - 1}/{len(data)}"})
                return
            if body:
                self.asked.append(asked)
            self.send(
                data if body else b"",
                headers={"X-Repo-Commit": 40 * "1", "ETag": f'"{hash((file, len(data)))}"'},
                length=len(data),
            )
        else:
            self.send(b"", 200 if url.path == "/" else 404, {"X-Error-Code": "EntryNotFound"})

    def send(self, said, status=200, headers=None, length=None):
        data = said if isinstance(said, bytes) else json.dumps(said).encode()
        self.send_response(status)
        for key, value in {
            **(headers or {}),
            "Content-Length": str(len(data) if length is None else length),
        }.items():
            self.send_header(key, value)
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, *_, **__):
        pass


@pytest.fixture(scope="module")
def hub(tmp_path_factory):
    """What a program says and asks of that hub, which begins engines one after the other: how each drafts, its warnings."""
    place = tmp_path_factory.mktemp("hub")
    model, put = heads_beside(place)
    wrong = put("tiny-DFlash", "dflash-jetspec-causal", hidden_size=128)
    Hub.folders = {
        "org/tiny": model,
        "org/tiny-DFlash": wrong,
        "org/tiny-DSpark": put("tiny-DSpark", "dspark-qwen3-gated"),
    }
    for name, fields in (("tiny", {}), ("other", {"block_count": 7})):
        (files := place / f"{name} files").mkdir()
        write_two_files(files, **fields)
        Hub.folders[f"org/{name}-GGUF"] = files
    server = ThreadingHTTPServer(("127.0.0.1", 0), Hub)
    Thread(target=server.serve_forever, daemon=True).start()
    url = f"http://127.0.0.1:{server.server_port}"
    environment = {name: value for name, value in os.environ.items() if name != "HF_HUB_OFFLINE"}
    environment |= {"HF_ENDPOINT": url, "HF_HOME": str(place / "cache"), "HF_HUB_DISABLE_XET": "1"}
    yield subprocess.run(
        [sys.executable, "-c", PROGRAM],
        env=environment,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    server.shutdown()
    server.server_close()


PROGRAM = """
from polydraft import Engine, SamplingParams
from polydraft.errors import ModelLoadError
engines = ("tiny", {}), ("tiny", {"head": "org/tiny-DSpark"}), ("tiny-GGUF:F16", {}), ("other-GGUF:F16", {}), ("tiny", {"head": "org/tiny-DFlash"})
for model, options in engines:
    try:
        engine = Engine.from_pretrained(f"org/{model}", depth=2, max_model_len=64, max_num_seqs=1, **options)
    except ModelLoadError as error:
        print(error)
        continue
    (result,) = engine.generate([[5, 6, 7]], SamplingParams(temperature=0, max_tokens=8, ignore_eos=True))
    print(engine.drafter.info.name, result.stats.drafted_tokens > 0)
"""


def test_the_hub_is_asked_for_a_head_which_is_checked_before_its_weights_are_fetched(hub):
    assert hub.stdout.splitlines()[0] == "block True", hub.stderr
    assert (
        "'org/tiny-DFlash' was found and is not used: its states have hidden_size=128 numbers, the model's 64"
        in hub.stderr
    )
    assert "'org/tiny-DSpark' was found and drafts" in hub.stderr
    assert {name for name in Hub.asked if "DFlash" in name} == {"org/tiny-DFlash/config.json"}
    assert "org/tiny-DSpark/model.safetensors" in Hub.asked


def test_a_head_of_the_hub_is_named_and_one_for_another_model_is_refused_by_its_configuration_alone(hub):
    assert hub.stdout.splitlines()[1] == "block True", hub.stderr
    assert "is not for 'org/tiny': its states have hidden_size=128" in hub.stdout


def test_the_file_with_further_layers_beside_one_of_the_hub_is_fetched_where_its_header_is_the_models(hub):
    further, other = hub.stdout.splitlines()[2:4]
    assert further == "mtp True" and other.startswith("ngram"), hub.stderr
    assert "mtp-tiny-F16.gguf' was found and drafts" in hub.stderr
    asked = [name for name in Hub.asked if "tiny-GGUF/mtp-" in name]
    assert asked == ["the header of org/tiny-GGUF/mtp-tiny-F16.gguf", "org/tiny-GGUF/mtp-tiny-F16.gguf"]
    refused = "'org/other-GGUF:mtp-tiny-F16.gguf' was found and is not used: it is for num_hidden_layers=6, the model has 4"
    assert refused in hub.stderr and "org/other-GGUF/mtp-tiny-F16.gguf" not in Hub.asked


def test_a_search_of_the_hub_that_fails_is_told_with_its_reason(tmp_path, monkeypatch):
    def fails(*_):
        raise OSError("no route to it")

    write_two_files(tmp_path)
    monkeypatch.setattr(finding, "hub_answers", lambda: True)
    monkeypatch.setattr(finding, "located", lambda _: tmp_path / "tiny-F16.gguf")
    monkeypatch.setattr(finding, "_listed", fails)
    with pytest.warns(UserWarning, match="not searched for a draft head of 'org/tiny-GGUF:F16': no route"):
        finding.fetch_predictor("org/tiny-GGUF:F16")
