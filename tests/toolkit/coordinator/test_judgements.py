"""Counts of devices that judge a model: which are taken, and what the coordinator makes of them."""

import time
from pathlib import Path

from device_agent.federation.fleet_status import lines
from device_agent.formats.evaluation_counts import Judgement
from device_agent.formats.manifest import (
    MANIFEST,
)
from device_agent.formats.protocol.fleet import RoundResult, Status
from judging_fleet import (
    SOUND,
    WITHOUT_SAMPLES,
    JudgedModel,
    both,
    counts,
    update_with,
)
from refusals import refused
from toolkit.coordinator.rounds.device_evaluation import DeviceCounts, federated_evaluation
from toolkit.coordinator.rounds.falling_quality import falling
from toolkit.coordinator.server import Server
from toolkit.coordinator.storage.coordinator_store import Store
from toolkit.coordinator.storage.saved_rounds import saved_rounds
from vector_fleet import (
    CONFIG,
    VectorModel,
    assert_soon,
    configured,
    enrol,
    joined,
    running,
    send,
    task,
)

HOSTILE = [
    ({"correct": 11}, "update.unusable-evaluation"),
    ({"samples": 10**12}, "update.unusable-evaluation"),
    ({"loss_sum": -1.0}, "update.unusable-evaluation"),
    ({"loss_sum": 1e308}, "update.unusable-evaluation"),
    ({"correct": -1}, "update.malformed-record"),
    ({"samples": 10**30}, "update.malformed-record"),
    ({"loss_sum": "nan"}, "update.malformed-record"),
    ({"loss_sum": None}, "update.malformed-record"),
    ({"counted": 11}, "update.unfitting-evaluation"),
    ({"correct": None}, "update.unfitting-evaluation"),
    ({"absolute_sum": 0.1}, "update.unfitting-evaluation"),
    ({"classes": [[6, 3], [4, 3]]}, "update.unasked-evaluation"),
]


def test_hostile_counts_are_refused(tmp_path: Path) -> None:
    """Whatever came before them, sound counts are then taken."""
    with running(configured(tmp_path, WITHOUT_SAMPLES), JudgedModel()) as server:
        link = enrol(server, tmp_path)["board-1"]
        for number, (changes, code) in enumerate(HOSTILE):
            hostile = both(SOUND, **changes)
            round_, update = update_with(link, tmp_path / f"hostile {number}", hostile)
            with refused(code):
                send(link, round_, update)
        round_, update = update_with(link, tmp_path / "sound", both(SOUND))
        send(link, round_, update)


def test_counts_that_nobody_asked_for_are_refused(tmp_path: Path) -> None:
    with running(configured(tmp_path), JudgedModel()) as server:
        link = enrol(server, tmp_path)["board-1"]
        round_, update = update_with(link, tmp_path / "unasked", both(SOUND))
        with refused("update.unasked-evaluation"):
            send(link, round_, update)


def test_a_restart_goes_on_with_the_judging_of_the_last_model(tmp_path: Path) -> None:
    config = configured(tmp_path, WITHOUT_SAMPLES.replace("rounds = 3", "rounds = 1"))
    with running(config, JudgedModel()) as server:
        links = enrol(server, tmp_path)
        for number, (name, link) in enumerate(links.items()):
            evaluation = None if name == "board-1" else both(counts(number, 4))
            send(link, *update_with(link, tmp_path / name, evaluation))
        first, second, board = links.values()
        assert board.work().state in ("wait", "finished")  # it has sent no counts
        work = task(first)
        assert (work.state, work.round) == ("judge", 1)
        assert work.evaluation is not None
        offered = next(offer.sha256 for offer in work.files if offer.name == MANIFEST)
        with refused("round.other-bundle"):
            first.send_judgement(1, Judgement(bundle="0" * 64, counts=counts(3, 4)))
        with refused("update.unusable-evaluation"):
            first.send_judgement(1, Judgement(bundle=offered, counts=counts(5, 4)))
        first.send_judgement(1, Judgement(bundle=offered, counts=counts(3, 4)))
        first.send_judgement(1, Judgement(bundle=offered, counts=counts(3, 4)))  # safe to repeat
        with refused("round.closed"):
            board.send_judgement(1, Judgement(bundle=offered, counts=counts(1, 4)))
        assert first.work().state == "finished"
        assert server.coordinator.status().state == "judging"
    with running(config, JudgedModel()) as server:
        first, second = (joined(server, tmp_path / str(number)) for number in (0, 1))
        assert_soon(lambda: first.work().state == "finished")
        work = task(second)
        offered = next(offer.sha256 for offer in work.files if offer.name == MANIFEST)
        second.send_judgement(1, Judgement(bundle=offered, counts=counts(1, 4)))
        assert_soon(lambda: server.coordinator.status().state == "finished")
        assert_soon(lambda: not server.coordinator.store.final_evaluation.answers())
        last = server.coordinator.status().history[-1].devices
    assert last is not None
    assert (last.devices, last.correct, last.counted, last.loss) == (2, 4, 8, 0.5)
    assert (last.accuracy, last.worst_accuracy, last.trained_loss) == (0.5, 0.25, None)


def test_devices_that_do_not_judge_in_time_are_left_out(tmp_path: Path) -> None:
    text = WITHOUT_SAMPLES.replace("rounds = 3", "rounds = 1")
    config = configured(tmp_path, text)
    with running(config, JudgedModel()) as server:
        links = enrol(server, tmp_path)
        for number, (name, link) in enumerate(links.items()):
            send(link, *update_with(link, tmp_path / name, both(counts(number, 4))))
        assert_soon(lambda: links["board-1"].work().state == "judge")
        server.coordinator.clock = lambda: time.monotonic() + config.deadline_s
        assert_soon(lambda: server.coordinator.status().state == "finished", 30)
        initial, last = server.coordinator.status().history
    assert last.devices is None
    assert initial.devices is not None
    assert (initial.devices.correct, initial.devices.counted) == (3, 12)


def test_somebody_has_to_judge(tmp_path: Path) -> None:
    text = CONFIG.replace('held_out = "held_out.npz"\n', "")
    with refused("federation.not-judged"):
        Server(configured(tmp_path, text), VectorModel(), Path("fleet.toml"))
    static = text.replace("epochs = 1", 'epochs = 1\nbatch_norm = "static"')
    static = static.replace("[[devices]]", "[evaluation]\nshare = 0.5\n\n[[devices]]", 1)
    with refused("federation.no-statistics"):
        Server(configured(tmp_path, static), VectorModel(), Path("fleet.toml"))
    site = "site = true\n" + WITHOUT_SAMPLES
    with refused("option.conflict"):
        Server(configured(tmp_path, site), VectorModel(), Path("fleet.toml"))


def test_the_share_cannot_change_later(tmp_path: Path) -> None:
    with running(configured(tmp_path, WITHOUT_SAMPLES)):
        pass
    with refused("state.other-federation", key="evaluation.share"):
        text = WITHOUT_SAMPLES.replace("share = 0.5", "share = 0.4")
        Server(configured(tmp_path, text), VectorModel(), Path("fleet.toml"))


def judged_round(round_: int, accuracy: float | None, loss: float | None = None) -> RoundResult:
    """A round that a device has judged; not yet if `accuracy` is None."""
    figure = None
    if accuracy is not None:
        device = DeviceCounts("board", counts(round(100 * accuracy), 100, loss))
        figure = federated_evaluation(round_ + 1, [device])
    return RoundResult(round=round_, accuracy=None, loss=None, updates=1, devices=figure)


def test_the_warning_rests_on_the_devices_without_samples() -> None:
    falls = [judged_round(n, a) for n, a in enumerate([0.9, 0.8, 0.7, 0.6, None])]
    warning = falling(falls)
    assert warning is not None
    assert "quality on the devices fell 3 rounds in a row" in warning
    assert "accuracy 0.6000" in warning
    assert falling([*falls[:-2], judged_round(3, 0.75), falls[-1]]) is None


def test_models_that_nobody_has_judged_yet_do_not_stay_for_ever(tmp_path: Path) -> None:
    store = Store(tmp_path, keep=2)
    for round_ in range(5):
        store.add_result(judged_round(round_, None), f"model {round_}".encode())
    store.close()
    saved = saved_rounds(tmp_path)
    assert [round_.round for round_ in saved if round_.kept] == [3, 4]
    assert not any(round_.best for round_ in saved)


def test_the_best_round_has_the_highest_accuracy_on_the_devices(tmp_path: Path) -> None:
    """Whatever its loss is. The judgement of a round comes with the result of the next."""
    store = Store(tmp_path, keep="best")
    accuracies = [0.5, 0.9, 0.7]
    for round_ in range(4):
        earlier = judged_round(round_ - 1, accuracies[round_ - 1], loss=100.0 * round_)
        received = earlier.devices if round_ else None
        store.add_result(judged_round(round_, None), f"model {round_}".encode(), received)
    store.close()
    saved = saved_rounds(tmp_path)
    assert [round_.round for round_ in saved if round_.best] == [1]
    assert [round_.round for round_ in saved if round_.kept] == [1, 3]


def test_the_status_shows_the_judgement_in_80_columns() -> None:
    shown = lines(
        Status(
            state="judging",
            round=3,
            rounds=3,
            expected_devices=1,
            devices=[],
            history=[judged_round(2, 0.8125), judged_round(3, None)],
            model_round=3,
        )
    )
    assert max(map(len, shown)) <= 80
    assert shown[0] == "round 3 of 3, judging"  # the newest model has no judgement yet
    assert " ".join(" ".join(shown[1:]).split()) == (
        "the devices judge the model of round 2: accuracy 0.8100 on 1 device (worst tenth: "
        "accuracy 0.8100)"
    )
