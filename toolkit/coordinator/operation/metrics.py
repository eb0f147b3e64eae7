"""Writes the federation's figures for Prometheus, with the library prometheus_client."""

from collections import Counter
from collections.abc import Iterator

from prometheus_client import CollectorRegistry, ProcessCollector, generate_latest
from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from toolkit.coordinator.federation_state import FederationState
from toolkit.coordinator.rounds.falling_quality import falling

PREFIX = "edgetailor_"


class Metrics(FederationState):
    """Gives the figures of the federation to Prometheus."""

    def metrics(self) -> bytes:
        """All figures, in Prometheus' text format."""
        registry = CollectorRegistry()
        registry.register(_Figures(self))
        ProcessCollector(registry=registry)  # memory and processor time of the coordinator
        return generate_latest(registry)


class _Figures(Collector):
    """Reads the figures of a federation, for one answer."""

    def __init__(self, state: FederationState) -> None:
        self._state = state

    def collect(self) -> Iterator[Metric]:
        """Yield each figure with its labels."""
        with self._state.lock:
            yield from self._rounds()
            yield from self._devices()
        yield from self._quality()
        closed = self._state.closed_connections()
        yield _counter(
            "closed_connections",
            "Connections that were closed because there were too many.",
            closed,
        )
        actions = self._state.store.operator_log.last()
        yield _counter("operator_actions", "Actions of the operator.", actions)

    def _rounds(self) -> Iterator[Metric]:
        rounds = self._state.rounds
        yield _counter("rounds", "Rounds that are over.", rounds.done)
        training = rounds.phase == "training"
        yield _gauge("round_open", "Whether a round is open (1).", float(training))
        if training:
            remaining = rounds.remaining_s(self._state.clock())
            yield _gauge("round_updates", "Updates of the open round.", len(rounds.updates))
            yield _gauge("round_updates_needed", "Updates that it needs.", rounds.needed)
            yield _gauge("round_late_devices", "Devices it waits for.", len(rounds.late()))
            if (selected := self._state.selected_devices()) is not None:
                yield _gauge("round_selected_devices", "Devices it has selected.", selected.asked)
            yield _gauge("round_remaining_seconds", "Seconds to its deadline.", remaining)
        missed = self._state.missed_deadlines
        text = "Deadlines of the open round that passed with too few updates."
        yield _gauge("round_missed_deadlines", text, missed)

        if self._state.config.clients_per_round is not None:
            text = "Devices that the last closed round selected and did not need."
            yield _gauge("not_needed_devices", text, self._state.not_needed[1])

    def _devices(self) -> Iterator[Metric]:
        devices, activity = self._state.store.registry.devices(), self._state.activity
        counts = Counter((device.kind, activity[device.id].state) for device in devices)
        family = GaugeMetricFamily(f"{PREFIX}devices", "Devices.", labels=["kind", "state"])
        for labels, count in counts.items():
            family.add_metric(labels, count)
        yield family
        traffic = CounterMetricFamily(
            f"{PREFIX}traffic_bytes", "Bytes of message bodies.", labels=["direction"]
        )
        traffic.add_metric(["fetched"], sum(device.bytes_down for device in devices))
        traffic.add_metric(["sent"], sum(device.bytes_up for device in devices))
        yield traffic

    def _quality(self) -> Iterator[Metric]:
        current = self._state.store.history.current_round()
        history = self._state.store.history.results()
        falls = falling(history) is not None
        yield _gauge("quality_falling", "Whether the quality falls, quickly or slowly (1).", falls)
        accuracy = GaugeMetricFamily(
            f"{PREFIX}model_accuracy", "Accuracy of the global model.", labels=["data"]
        )
        loss = GaugeMetricFamily(
            f"{PREFIX}model_loss", "Loss of the global model.", labels=["data"]
        )
        for result in (r for r in history if r.round == current):
            for data, judged in (("held_out", result), ("devices", result.devices)):
                if judged is not None and judged.accuracy is not None:
                    accuracy.add_metric([data], judged.accuracy)
                if judged is not None and judged.loss is not None:
                    loss.add_metric([data], judged.loss)
        yield accuracy
        yield loss


def _gauge(name: str, text: str, value: float) -> Metric:
    return GaugeMetricFamily(PREFIX + name, text, value=value)


def _counter(name: str, text: str, value: float) -> Metric:
    return CounterMetricFamily(PREFIX + name, text, value=value)
