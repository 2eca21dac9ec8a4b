"""The explorer finds what was recorded, and refuses what is no measurement."""

import pytest

from fourwalls.course import explorer as module

CSV = """benchmark,case.ranks,case.bytes,case.algorithm,case.checks,metric,value,unit,low,high
all-reduce,2,4096,tree,False,time,0.0002,s,0.0001,0.0003
launch,2,,,,time,0.1,s,,
"""


def test_recorded_results_are_found(project):
    assert module.recorded() is None
    folder = project / "data" / "results"
    folder.mkdir()
    assert module.recorded() is None, "an empty folder holds nothing"
    (folder / "here.csv").write_text(CSV)
    found = module.recorded()
    assert found["times"] == {"tree": {2: [(4096, 0.0002, 0.0001, 0.0003)]}} and found["name"] == "recorded machine"


def test_words_and_bad_arguments(project, capsys):
    assert module.explorer() is None
    assert "192 ranks, 1 GiB: in the model hierarchical wins" in capsys.readouterr().out
    with pytest.raises(ValueError, match="times"):
        module.explorer([1, 2])
