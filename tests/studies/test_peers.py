"""What talks to llama.cpp's server, here to the project's own, which speaks its format; the build itself takes minutes and is run by hand."""

import sys
from pathlib import Path

from polydraft.models import pair
from studies.peers import LlamaServer, flags, tokens_of


def test_a_stream_tells_how_many_tokens_came_and_ends_after_all():
    server = LlamaServer(
        Path(sys.executable),
        ["-m", "polydraft", "serve", "--model", str(pair.draft_folder()), "--drafter", "none"],
    )
    try:
        pieces = list[int]()
        assert server.stream([5, 6, 7], 12, 0.0, 1, pieces.append) == sum(pieces) == 12
        assert len(pieces) > 1 and server.peak_megabytes() > 10
    finally:
        server.close()


def test_flags_name_the_draft_model_and_its_length_or_the_kind_of_lookup():
    plain = flags(Path("a.gguf"), 2, 64, None, "plain", 4)
    assert plain == ["-m", "a.gguf", "-t", "2", "-tb", "2", "-c", "64", "-np", "1", "-ngl", "0"]
    assert flags(Path("a.gguf"), 2, 64, Path("b.gguf"), "draft", 4)[len(plain) :] == [
        "--spec-type",
        "draft-simple",
        "-md",
        "b.gguf",
        "-td",
        "2",
        "--spec-draft-n-max",
        "4",
    ]
    assert flags(Path("a.gguf"), 2, 64, None, "ngram_map_k", 4)[len(plain) :] == [
        "--spec-type",
        "ngram-map-k",
    ]


def test_ik_llama_cpp_takes_its_draft_model_by_flags_of_its_own():
    plain = flags(Path("a.gguf"), 2, 64, None, "plain", 4, "ik_llama.cpp")
    assert flags(Path("a.gguf"), 2, 64, Path("b.gguf"), "draft", 4, "ik_llama.cpp")[len(plain) :] == [
        "-md",
        "b.gguf",
        "-td",
        "2",
        "--draft-max",
        "4",
    ]


def test_a_piece_of_a_stream_that_names_no_tokens_is_one_and_the_last_event_none():
    pieces = [{"content": "a", "stop": False}, {"content": "b", "stop": False}, {"content": "", "stop": True}]
    assert [tokens_of(piece) for piece in pieces] == [1, 1, 0]
    assert tokens_of({"tokens": [5, 6], "stop": False}) == 2
