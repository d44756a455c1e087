"""``npu.callbacks.KubeflowProgress`` against an HTTPS server with a certificate of its own."""

from __future__ import annotations

import json
import shutil
import ssl
import subprocess
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tensorflow as tf
from caught_messages import hears, settings
from pool import Pool

import npu_device as npu

pytestmark = pytest.mark.skipif(
    shutil.which("openssl") is None, reason="needs openssl to make a certificate"
)


class _Server(HTTPServer):
    received: list[Any]
    answers = True


class _Handler(BaseHTTPRequestHandler):
    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        assert isinstance(self.server, _Server)
        if not self.server.answers:
            self.wfile.write(b"no answer of HTTP\r\n")
            return
        self.server.received.append((self.headers["Authorization"], body["trainerStatus"]))
        self.send_response(200)
        self.end_headers()

    def log_message(self, *_: Any) -> None:
        pass


@pytest.fixture
def server(tmp_path: Path) -> Iterator[tuple[_Server, dict[str, str]]]:
    key, certificate, token = tmp_path / "key.pem", tmp_path / "certificate.pem", tmp_path / "token"
    command = [
        "openssl",
        "req",
        "-x509",
        "-newkey",
        "rsa:2048",
        "-nodes",
        "-days",
        "1",
        "-subj",
        "/CN=localhost",
    ]
    command += [
        "-addext",
        "subjectAltName=DNS:localhost",
        "-keyout",
        str(key),
        "-out",
        str(certificate),
    ]
    subprocess.run(command, check=True, capture_output=True, timeout=60)
    token.write_text("secret\n")
    found = _Server(("localhost", 0), _Handler)
    found.received = []
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificate, key)
    found.socket = context.wrap_socket(found.socket, server_side=True)
    thread = threading.Thread(target=found.serve_forever)
    thread.start()
    variables = {
        "KUBEFLOW_TRAINER_SERVER_URL": f"https://localhost:{found.server_port}/status",
        "KUBEFLOW_TRAINER_SERVER_CA_CERT": str(certificate),
        "KUBEFLOW_TRAINER_SERVER_TOKEN": str(token),
    }
    try:
        yield found, variables
    finally:
        found.shutdown()
        thread.join()
        found.server_close()


@hears
def body(texts: list[str], variables: dict[str, str]) -> list[str]:
    with settings(**variables):
        model = tf.keras.Sequential([tf.keras.layers.Dense(1)])
        model.compile("sgd", "mse")
        npu.distribute.replicate(model)
        data = np.ones([4, 2], np.float32), np.ones([4, 1], np.float32)
        # As metrics with a number for each class do.
        vector = tf.keras.callbacks.LambdaCallback(
            on_epoch_end=lambda epoch, logs: logs.update(each=np.ones(3))
        )
        callbacks = [vector, npu.callbacks.KubeflowProgress()]
        model.fit(*data, epochs=8, verbose=0, callbacks=callbacks)
    return texts


def test_progress(two_ranks: Pool, server: tuple[_Server, dict[str, str]]) -> None:
    found, variables = server
    texts = two_ranks.run(body, {**variables, "KUBEFLOW_TRAINER_SERVER_TOKEN": "/no/such/file"})
    told, silent = [sum("was not reported to Kubeflow" in text for text in each) for each in texts]
    assert 2 <= told < 8 and silent == 0  # at most one each 5 s, and the last
    found.answers = False
    texts += two_ranks.run(body, variables)
    assert any("was not reported to Kubeflow: no answer of HTTP" in text for text in texts[2])
    found.answers = True
    assert found.received == []
    texts = two_ranks.run(body, variables)
    assert not any("Kubeflow" in text for each in texts for text in each)
    (first, one), *others, (_, last) = found.received
    assert first == "Bearer secret" and len(others) < 6
    assert (
        one["progressPercentage"],
        last["progressPercentage"],
        last["estimatedRemainingSeconds"],
    ) == (12, 100, 0)
    assert [metric["name"] for metric in last["metrics"]] == ["loss"] and float(
        last["metrics"][0]["value"]
    ) >= 0
