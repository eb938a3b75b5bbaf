"""The study of encoder-decoders: texts of catalogues, batches, and its figures on a model that has learnt nothing yet."""

import torch

from studies.seq2seq import corpus, measure, teacher
from studies.seq2seq.corpus import Pair
from studies.seq2seq.glancing import start_of
from tests.models.encoder_decoders import small

CATALOGUE = """
msgid ""
msgstr "Content-Type: text/plain; charset=utf-8\\nPlural-Forms: nplurals=2; plural=(n != 1);\\n"

msgid "Save"
msgstr "Speichern"

#, fuzzy
msgid "Close"
msgstr "Öffnen"

msgid "%d page"
msgid_plural "%d pages"
msgstr[0] "%d Seite"
msgstr[1] "%d Seiten"
"""


def test_messages_of_catalogues_are_pairs_without_fuzzy_ones_and_no_source_is_on_both_sides(tmp_path):
    folder = tmp_path / "app" / "locale" / "de" / "LC_MESSAGES"
    folder.mkdir(parents=True)
    (folder / "app.po").write_text(CATALOGUE, encoding="utf-8")
    pairs = corpus.natural(tmp_path)
    found = {p.source: p.reference for p in pairs}
    assert found["tr Save"] == "Speichern" and found["tr %d pages"] == "%d Seiten" and "tr Close" not in found
    assert found["tr Germany"] == "Deutschland"
    trained, kept = corpus.split([*pairs, *pairs], 40)
    assert len(kept) == 40 and not {p.source for p in trained} & {p.source for p in kept}


def test_contenders_take_turns_and_lossless_ones_write_what_plain_decoding_does(monkeypatch):
    tokenizer = teacher.make_tokenizer(["ab ba"] * 3, 260)
    model = small("marian")
    model.resize_token_embeddings(len(tokenizer))
    torch.manual_seed(0)
    rows = list[dict]()
    monkeypatch.setattr(
        measure,
        "_rows",
        lambda task, pairs, texts, calls, tokens, seconds: (
            rows.append({"texts": texts, "calls": calls}) or []
        ),
    )
    monkeypatch.setattr(measure, "GREEDY", measure.GREEDY.with_(max_tokens=6))
    measure.measured(
        model,
        tokenizer,
        start_of(model, queries=3),
        [Pair("ab", "ba", "made"), Pair("b", "b", "made")],
        [(3, 1.0)],
    )
    texts = rows[0]["texts"]
    assert (
        texts["lossless, mask queries"]
        == texts["lossless, n-gram"]
        == texts["plain"]
        == texts["beta 1, tau 0"]
    )
    assert all(call > 0 for each in rows[0]["calls"].values() for call in each)
