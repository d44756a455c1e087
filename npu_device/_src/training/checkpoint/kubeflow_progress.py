"""``npu.callbacks.KubeflowProgress``: tells Kubeflow Trainer how far ``fit`` is."""

from __future__ import annotations

import json
import logging
import ssl
import time
import urllib.request
from datetime import datetime, timezone
from http.client import HTTPException
from pathlib import Path
from typing import Any

import numpy as np
import tensorflow as tf

from npu_device._src import environment
from npu_device._src.cluster.time_limits import PROGRESS_PAUSE_SECONDS, PROGRESS_REPORT_SECONDS
from npu_device._src.training.distribute.ranks import is_main

_log = logging.getLogger("npu_device")


class KubeflowProgress(tf.keras.callbacks.Callback):
    """Report percentage, remaining seconds and logs of ``fit`` to Kubeflow Trainer after each epoch, from rank 0.

    Does nothing unless ``KUBEFLOW_TRAINER_SERVER_URL`` is set. A report that fails is a warning. Other ranks see
    nothing.

    Source: Kubeflow Trainer 2.2, "TrainJob progress" (alpha).
    """

    def on_train_begin(self, logs: Any = None) -> None:
        """Remember the time."""
        self._began = time.monotonic()
        self._first_epoch: int | None = None
        # The last report counts as long ago, so that the first epoch is reported in any case.
        self._reported = -PROGRESS_PAUSE_SECONDS

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        """Remember the first epoch, which isn't 0 in a training that is resumed."""
        if self._first_epoch is None:
            self._first_epoch = epoch

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        """Report, unless the last report is less than 5 s old and more epochs follow."""
        url = environment.KUBEFLOW_TRAINER_SERVER_URL.get()
        if url is None or not is_main():
            return
        time_now = time.monotonic()
        epochs_done = epoch + 1
        epochs = int(self.params["epochs"])
        if epochs_done < epochs and time_now - self._reported < PROGRESS_PAUSE_SECONDS:
            return
        self._reported = time_now
        epochs_here = epochs_done - (self._first_epoch or 0)
        seconds = (time_now - self._began) / epochs_here * (epochs - epochs_done)
        metrics = []
        for name, metric in (logs or {}).items():
            # Keras allows vectors, such as one number for each class.
            if np.size(metric) == 1:
                metrics.append({"name": name, "value": f"{np.asarray(metric).item():g}"})
        status = {
            "progressPercentage": 100 * epochs_done // epochs,
            "estimatedRemainingSeconds": round(seconds),
            "metrics": metrics,
            "lastUpdatedTime": datetime.now(timezone.utc).isoformat(),
        }
        try:
            # The token is renewed while the job runs, so it is read each time.
            token_file = environment.KUBEFLOW_TRAINER_SERVER_TOKEN.get() or ""
            token = Path(token_file).read_text().strip()
            headers = {"Authorization": f"Bearer {token}", "Content-Type": "application/json"}
            body = json.dumps({"trainerStatus": status}).encode()
            request = urllib.request.Request(url, body, headers)
            authority_file = environment.KUBEFLOW_TRAINER_SERVER_CA_CERT.get()
            # The cluster itself has signed the server's certificate, so its authority is the one to trust.
            context = ssl.create_default_context(cafile=authority_file)
            timeout = PROGRESS_REPORT_SECONDS
            urllib.request.urlopen(request, timeout=timeout, context=context).close()
        except (OSError, ValueError, HTTPException) as error:
            _log.warning(
                "the progress of epoch %d was not reported to Kubeflow: %s", epochs_done, error
            )
