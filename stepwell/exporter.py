"""Counters and gauges in Prometheus' text format: over HTTP, or in a file that is kept fresh."""

import logging
import threading
from collections.abc import Callable, Iterator

from prometheus_client import CollectorRegistry, start_http_server, write_to_textfile
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from stepwell.errors import ConfigError
from stepwell.metrics import DEFINITIONS, GAUGES, Metrics

__all__ = ["PREFIX", "Exporter"]

logger = logging.getLogger(__name__)

PREFIX = "stepwell_"
"""What every name begins with."""

_FILE_EVERY_S = 5.0


class _Source(Collector):
    """What the client library asks when somebody wants the present values."""

    def __init__(
        self, metrics: Metrics, gauges: Callable[[], dict[tuple[str, str], float]]
    ) -> None:
        self._metrics = metrics
        self._gauges = gauges

    def collect(self) -> Iterator[Metric]:
        """Every series."""
        values = self._metrics.snapshot()
        for definition in DEFINITIONS:
            counter = CounterMetricFamily(
                PREFIX + definition.name, definition.documentation, labels=definition.labels
            )
            for (name, labels), value in sorted(values.items()):
                if name == definition.name:
                    counter.add_metric(labels, value)
            yield counter
        present = self._gauges()
        for definition in GAUGES:
            gauge = GaugeMetricFamily(
                PREFIX + definition.name, definition.documentation, labels=definition.labels
            )
            for (name, tier), level in sorted(present.items()):
                if name == definition.name:
                    gauge.add_metric((tier,), level)
            yield gauge


class Exporter:
    """Exports until it is closed.

    A port is served by threads of the client library, a file is written every five seconds, and
    once more at the end; it appears whole, by rename.

    Args:
        target: as `stepwell.settings.parse_target` gave it.
        metrics: the counters.
        gauges: asked for present values, on the exporter's threads.

    Raises:
        ConfigError: the address or the file cannot be used.
    """

    def __init__(
        self,
        target: tuple[str, int] | str,
        metrics: Metrics,
        gauges: Callable[[], dict[tuple[str, str], float]],
    ) -> None:
        self._registry = CollectorRegistry()
        self._registry.register(_Source(metrics, gauges))
        self._stop = threading.Event()
        self._server = None
        self._path = ""
        try:
            if isinstance(target, str):
                self._path = target
                write_to_textfile(target, self._registry)
                self._thread = threading.Thread(
                    target=self._keep_fresh, name="stepwell-metrics", daemon=True
                )
                self._thread.start()
            else:
                host, port = target
                self._server, self._thread = start_http_server(
                    port, addr=host, registry=self._registry
                )
        except OSError as error:
            where = target if isinstance(target, str) else f"{target[0]}:{target[1]}"
            raise ConfigError(
                f"metrics cannot be exported there ({error.strerror or error}): metrics={where}"
            ) from error

    def close(self) -> None:
        """Stop; may be called twice."""
        if self._stop.is_set():
            return
        self._stop.set()
        if self._server is not None:
            self._server.shutdown()
            self._server.server_close()
        self._thread.join()
        if self._path:
            self._write()

    def _keep_fresh(self) -> None:
        while not self._stop.wait(_FILE_EVERY_S):
            self._write()

    def _write(self) -> None:
        try:
            write_to_textfile(self._path, self._registry)
        except OSError as error:
            logger.warning("cannot write metrics: path=%s error=%s", self._path, error)
