from studies.replicas import ACCEPTANCES, CONTEXTS, MODELLED, Measured, gpu, modelled


def test_drafts_pay_less_in_larger_batches_and_more_there_with_long_contexts():
    gains = {(row["acceptance"], row["context"], row["batch"]): row["gain"] for row in gpu()}
    for acceptance in ACCEPTANCES:
        short = [gains[acceptance, CONTEXTS[0], size] for size in (1, 64, 256, 512)]
        assert short == sorted(short, reverse=True) and short[0] > 1.4 and short[-1] < 1.1
    assert gains[0.8, 4096, 64] > gains[0.8, 512, 256]


def test_replicas_bring_what_they_are_until_what_is_before_them_is_full():
    alone = Measured("polydraft serve", 1, 0.0, 0.0, of_replicas=0.01, of_busiest=0.0, of_rest=0.0)
    one = Measured("1 behind Serve", 1, 0.0, 0.0, of_replicas=0.01, of_busiest=0.001, of_rest=0.0)
    four = Measured("4 behind Serve", 4, 0.0, 0.0, of_replicas=0.03, of_busiest=0.003, of_rest=0.0)
    assert list(modelled([alone, one, four]).values()) == [100, 200, 400, 800, 1000, 1000, 1000]
    assert modelled([alone])[MODELLED[-1]] == 6400
