"""``npu.callbacks.KubeflowProgress``: tells Kubeflow Trainer how far ``fit`` is."""

from __future__ import annotations

import json
import logging
import ssl
import time
import urllib.request
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

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
        self._began, self._reported = time.monotonic(), -PROGRESS_PAUSE_SECONDS

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        """Report, unless the last report is less than 5 s old and more epochs follow."""
        url, done, now = environment.KUBEFLOW_TRAINER_SERVER_URL.get(), epoch + 1, time.monotonic()
        epochs = int(self.params["epochs"])
        if (
            url is None
            or not is_main()
            or (done < epochs and now - self._reported < PROGRESS_PAUSE_SECONDS)
        ):
            return
        self._reported = now
        status = {
            "progressPercentage": 100 * done // epochs,
            "estimatedRemainingSeconds": round((now - self._began) / done * (epochs - done)),
            "metrics": [
                {"name": name, "value": f"{float(value):g}"} for name, value in (logs or {}).items()
            ],
            "lastUpdatedTime": datetime.now(timezone.utc).isoformat(),
        }
        try:
            token = (
                Path(environment.KUBEFLOW_TRAINER_SERVER_TOKEN.get() or "").read_text().strip()
            )  # it is renewed
            headers = {"Authorization": f"Bearer {token}", "Content-Type": "application/json"}
            request = urllib.request.Request(
                url, json.dumps({"trainerStatus": status}).encode(), headers
            )
            context = ssl.create_default_context(
                cafile=environment.KUBEFLOW_TRAINER_SERVER_CA_CERT.get()
            )
            urllib.request.urlopen(
                request, timeout=PROGRESS_REPORT_SECONDS, context=context
            ).close()
        except (OSError, ValueError) as error:
            _log.warning("the progress of epoch %d was not reported to Kubeflow: %s", done, error)
