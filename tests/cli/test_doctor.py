import json

from typer.testing import CliRunner

from polydraft.cli.main import app


def test_doctor_measures_this_machine_and_says_which_path_is_active_and_why():
    found = CliRunner().invoke(app, ["doctor", "--json"])
    assert found.exit_code == 0, found.output
    facts = json.loads(found.stdout)
    assert facts["machine"]["copy_bandwidth_gb_per_s"] > 0
    assert facts["embedded target"]["path"] == "CompiledLlama"
    assert "Llama" in facts["embedded target"]["why"]
    assert facts["embedded pair"]["prompts"] > 0
    assert set(facts["versions"]) >= {"python", "polydraft", "torch", "transformers", "numba"}
