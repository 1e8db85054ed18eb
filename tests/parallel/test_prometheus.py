"""What Prometheus gets: the numbers of Parallel.stats(), in OpenMetrics' names and units."""

import re
import socket
from urllib.request import Request, urlopen

import pytest
import torch
from pool import run_on_ranks
from ports import unused_ports
from repository import ROOT

import syncengine

prometheus_client = pytest.importorskip("prometheus_client", reason="make test installs prometheus-client")


@run_on_ranks(world=2)
def test_each_rank_serves_its_numbers():
    from syncengine.prometheus import export

    registry = prometheus_client.CollectorRegistry()
    model = syncengine.Parallel(torch.nn.Linear(8, 8))
    (port,) = unused_ports()
    with socket.create_server(("0.0.0.0", 0)) as taken, pytest.raises(OSError, match="in use"):
        export(model, port=taken.getsockname()[1], registry=registry)
    export(model, port=port, registry=registry)
    for _ in range(3):
        model(torch.ones(2, 8)).sum().backward()
    request = Request(f"http://127.0.0.1:{port}/metrics", headers={"Accept": "application/openmetrics-text"})
    text = urlopen(request, timeout=60).read().decode()
    assert text.count("# UNIT syncengine_step_seconds seconds") == 1
    label = f'{{rank="{syncengine.rank()}"}}'
    found = dict(line.rsplit(" ", 1) for line in text.splitlines() if not line.startswith("#"))
    assert float(found[f"syncengine_steps_total{label}"]) == 3
    assert float(found[f"syncengine_reduced_bytes_total{label}"]) == 3 * 4 * (8 * 8 + 8)
    assert float(found[f"syncengine_step_seconds{label}"]) == pytest.approx(model.stats()["step_ms"] / 1000)
    table = (ROOT / "docs" / "monitoring.md").read_text()
    assert {name.split("{")[0] for name in found} == set(re.findall(r"^\| `(syncengine_\w+)`", table, re.MULTILINE))
    del model
    assert all(line.startswith("#") for line in urlopen(request, timeout=60).read().decode().splitlines())
