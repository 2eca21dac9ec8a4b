"""bench prune on tiny sizes: each row right and complete, each fault seen, the study fair."""

from types import SimpleNamespace

import pytest
import torch

from fourwalls import bench
from fourwalls.bench import prune as bench_prune
from fourwalls.bench import prune_study
from fourwalls.bench.distill_study import TextStudy, follow_text, text_students, unseen_share
from fourwalls.nn import text
from fourwalls.numerics.prune import prune_masks, spare

torch.set_num_threads(1)
TINY = {"width": 16, "layers": 1, "heads": 4, "length": 8}


def test_rows_of_prune():
    options = SimpleNamespace(pairs=2, algorithms=["unstructured", "2:4", "structured"])
    rows = list(bench.load("prune").rows(options, case=bench_prune.PruneCase(batch=2, **TINY)))
    assert all(row.ok for row in rows) and [row.metric for row in rows] == ["time", "speed-up", "predicted"] * 3
    predicted = {row.case["form"]: row for row in rows if row.metric == "predicted"}
    assert predicted["unstructured"].value == predicted["2:4"].value == 1 and predicted["unstructured"].source == "modelled"
    blocks, head = 2 * (4 * 16 * 16 + 2 * 8 * 16 + 2 * 16 * 64), 2 * 16 * 256
    assert predicted["structured"].value == pytest.approx((blocks + head) / (blocks / 2 + head), rel=1e-12)
    assert {row.peer for row in rows if row.metric == "time"} == {"dense"}
    with pytest.raises(ValueError, match="no form 'sparse'; there are unstructured"):
        list(bench_prune.rows(SimpleNamespace(pairs=2, algorithms=["sparse"])))


@pytest.mark.parametrize("form", bench_prune.FORMS)
def test_a_wrong_form_is_not_ok(form):
    case = bench_prune.PruneCase(batch=2, **TINY)
    assert case.right(form)
    weight = case.forms[form].blocks[0].mlp.down.weight
    with torch.no_grad():
        weight[:, 2:4] = 1.0  # another number of zeros, or another function
    assert not case.right(form)


@pytest.mark.parametrize("share", (0.5, 0.99))
def test_csr_gives_the_dense_product(share):
    row = bench_prune.csr_product(share, 2, rows=8, inputs=40, outputs=30)
    assert row.ok and row.time_ratio > 0 and row.peer == "dense product"


def test_the_study_is_complete_and_fair():
    study = prune_study.PruneStudy(sizes=(64, 16, 16, 10), small=(64, 4, 10), steps=40, lessons=30, share=0.5)
    run = prune_study.of_seed(1, study)
    rows = {(row.case["what"], row.case["form"]): row for row in prune_study.summary([run, run])}
    assert len(rows) == 7 and all(row.low == row.value == row.high for row in rows.values())
    assert {form for what, form in rows if what == "distillation"} == {"teacher", "alone", "with teacher", "gain"}
    points = {form: rows["distillation", form].value for form in ("alone", "with teacher", "gain")}
    assert points["gain"] == pytest.approx(points["with teacher"] - points["alone"])
    teacher = study.teacher(1)
    assert prune_study.loss(teacher) < 2.3  # it has learned something
    study.soft = 0.0
    same = prune_study.students(teacher, study, 1)
    assert same["alone"] == same["with teacher"] == points["alone"]  # with no word of the teacher both students are one


def test_the_study_of_texts_is_complete_and_fair():
    sizes = {"length": 8, "batch": 2, "steps": 4, "teacher_steps": 3, "held_out": 2}
    studies = (TextStudy(windows=3, **sizes), TextStudy(windows=None, temperature=2.0, **sizes))
    rows = {
        (row.case["what"], row.case["form"]): row
        for row in bench_prune.rows(SimpleNamespace(pairs=1, algorithms=["text"], seeds=[1, 2]), texts=studies)
    }
    assert {what for what, _ in rows} == {
        "distilled GPT, 3 windows, temperature 1",
        "distilled GPT, all windows, temperature 2",
    } and len(rows) == 8
    for what in {what for what, _ in rows}:
        value = {form: rows[what, form].value for form in ("teacher", "alone", "with teacher", "gain")}
        assert value["gain"] == pytest.approx(value["alone"] - value["with teacher"])
        assert all(rows[what, form].unit == "nat" and rows[what, form].case["seeds"] == 2 for form in value)
        assert {rows[what, form].metric for form in ("alone", "teacher")} == {"loss"} and rows[what, "gain"].metric == "gain"
    teacher = studies[0].teacher(1)
    for study in studies:
        study.soft = 0.0
        same = text_students(teacher, study, 1)
        assert same["alone"] == same["with teacher"]  # with no word of the teacher both students are one
    shares = [unseen_share(teacher, study) for study in studies]
    assert 0 < shares[0] < shares[1] < 1  # a higher temperature takes from what may come and gives to what never does
    seen = []
    follow_text(teacher, lambda x, y: seen.append(x) or torch.zeros((), requires_grad=True), studies[0], 1,
                steps=6, lr=0.1, batch=2, windows=3)  # fmt: skip
    few = {tuple(row.tolist()) for row in text.batch(1, 0, batch=3, length=8)[0]}
    assert {tuple(row.tolist()) for x in seen for row in x} == few  # the same three again and again


def test_every_form_of_the_study_has_as_many_zeros():
    model = prune_study.PruneStudy(steps=5).teacher(1)
    sizes = {name: p.numel() for name, p in prune_study.weights_of(model).items()}
    found, lines = prune_study.zeros(model, 0.6)
    assert list(found) == ["same share everywhere", "vital spared", "another spared"] and len(lines) == len(sizes) == 7
    for names in ([], [lines[0].name]):
        shares = spare(sizes, names, 0.6)
        masks = prune_masks(prune_study.weights_of(model), shares)
        assert masks.share() == pytest.approx(0.6, abs=len(sizes) / sum(sizes.values()))
