"""The study of encoder-decoders: texts of catalogues."""

from studies.seq2seq import corpus

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
