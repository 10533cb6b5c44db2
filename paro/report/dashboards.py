"""TensorBoard and Weights & Biases, each written by its own thread, under Megatron's tags."""

# Both packages are optional and both use disks and networks. Each has its own writer thread with a
# bounded queue: a dashboard that fails or hangs costs one printed line and that dashboard, but
# never stops the training.

from __future__ import annotations

import queue
import re
import threading
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

from paro.errors import UserError, one_line, printable, shown, type_and_message
from paro.files.atomic_file import replace_file
from paro.files.regular_file import read_text
from paro.report.config import ReportConfig
from paro.report.earlier import set_aside_in
from paro.report.log import Log

Scalars = Mapping[str, float]

_SAMPLES = "samples"  # TensorBoard's folder of curves over samples
_QUEUE_LENGTH = 1000  # at most so many writes wait in a dashboard's queue
_CLOSE_SECONDS = 60.0  # at most so long the end of a run waits for writes and uploads
_MAX_NAME_CHARS = 128  # Weights & Biases' limit for names of runs and figures
RUN_ID_FILE = "wandb_run_id.txt"
_LOCAL_MODES = ("offline", "dryrun", "disabled")  # wandb modes that send nothing


class TensorBoard:
    """Event files with each tag over iterations, and `<tag> vs samples` over samples.

    A resumed run purges values after `start_iteration`: TensorBoard hides the values of older files
    from a step on. Steps are iterations or samples, so curves over samples have their own files.
    A new run moves files of an earlier run into a subfolder, which TensorBoard shows separately.
    """

    name = "TensorBoard"

    def __init__(
        self, config: ReportConfig, _arguments: Mapping[str, object], start_iteration: int
    ) -> None:
        from torch.utils.tensorboard import SummaryWriter

        self.place = str(config.tensorboard_dir)
        folder = Path(self.place)
        self._samples_folder = folder / _SAMPLES
        if start_iteration == 0:
            folders = (folder, self._samples_folder)
            files = [path for each in folders for path in each.glob("events.out.tfevents.*")]
            if (earlier := set_aside_in(folder, files)) is not None:
                self.place += f"; what an earlier run wrote there is in {earlier} now"
        self._start_iteration = start_iteration
        self._open: Any = partial(SummaryWriter, max_queue=config.tensorboard_queue_size)
        self._over_iterations = self._open(str(folder), purge_step=start_iteration + 1)
        self._over_samples: Any = None

    def write(self, scalars: Scalars, iteration: int, samples: int) -> None:
        for tag, value in scalars.items():
            self._over_iterations.add_scalar(tag, value, iteration)
        if iteration <= self._start_iteration:  # values written at the start of the run
            return
        if self._over_samples is None:
            self._over_samples = self._open(str(self._samples_folder), purge_step=samples)
        for tag, value in scalars.items():
            self._over_samples.add_scalar(f"{tag} vs samples", value, samples)

    def close(self) -> None:
        self._over_iterations.close()
        if self._over_samples is not None:
            self._over_samples.close()


class WeightsAndBiases:
    """Run of wandb with each tag over iterations, and the number of samples.

    A run resumed after `start_iteration` continues the wandb run whose id is stored in a file,
    rewound to `start_iteration`. A server that cannot rewind keeps the older values of repeated
    steps, since it accepts one value per step; `place` then says so.
    """

    name = "Weights & Biases"

    def __init__(
        self, config: ReportConfig, arguments: Mapping[str, object], start_iteration: int
    ) -> None:
        import wandb

        self._start_iteration = start_iteration
        # Next to the checkpoints, else to wandb's local files.
        folder = arguments.get("save") or config.wandb_save_dir
        id_file = None if folder is None else Path(str(folder)) / RUN_ID_FILE

        def begin(**how: Any) -> Any:
            return wandb.init(
                project=printable(config.wandb_project or ""),
                entity=config.wandb_entity and printable(config.wandb_entity),
                name=config.wandb_exp_name and one_line(config.wandb_exp_name, _MAX_NAME_CHARS),
                dir=config.wandb_save_dir,
                config={
                    name: shown(value) if isinstance(value, str) else value
                    for name, value in arguments.items()
                },
                # No wandb thread captures what ranks print: the output would fail with the
                # service. Silent: else its last words follow those of the run. Warnings and errors
                # still come. Not shared by two calls: wandb notes in it how a run was continued.
                settings=wandb.Settings(console="off", silent=True),
                **how,
            )

        run_id = read_run_id(id_file) if start_iteration > 0 else None
        self._run: Any = _continued(begin, run_id, start_iteration) if run_id else begin()
        mode = self._run.settings.mode
        self.place = mode if mode in _LOCAL_MODES else self._run.url
        if mode == "offline":
            self.place += f", until you run wandb sync {self._run.settings.sync_dir}"
        if self._run.starting_step > start_iteration + 1:
            last = self._run.starting_step - 1
            self.place += f", which keeps its values up to iteration {last}: it cannot rewind"
        if id_file is not None:
            id_file.parent.mkdir(parents=True, exist_ok=True)
            replace_file(id_file, f"{self._run.id}\n")

    def write(self, scalars: Scalars, iteration: int, samples: int) -> None:
        first: int = self._run.starting_step
        step = max(iteration, first) if iteration <= self._start_iteration else iteration
        if step >= first:
            self._run.log({**scalars, "samples vs steps": samples}, step=step)

    def close(self) -> None:
        self._run.finish()


def _continued(begin: Callable[..., Any], run_id: str, start_iteration: int) -> Any:
    """Return the wandb run of an id, rewound to an iteration if it has later values.

    Offline, the values on the server are unknown; `wandb sync` rewinds the run later.
    """
    import wandb

    rewound = partial(begin, resume_from=f"{run_id}?_step={start_iteration}")
    resumed = partial(begin, id=run_id, resume="allow")
    if wandb.setup().settings.mode in _LOCAL_MODES:
        return rewound()
    run = resumed()
    if run.starting_step <= start_iteration + 1:
        return run
    run.finish()
    try:
        return rewound()
    except wandb.Error:
        wandb.teardown()  # ends wandb's service process, in which the id stays in use
        return resumed()


def read_run_id(file: Path | None) -> str | None:
    """Return the wandb run id stored by an earlier start of the run; None if there is none."""
    if file is None or not file.exists():
        return None
    text = read_text(file, max_bytes=_MAX_NAME_CHARS).strip()
    if not re.fullmatch(r"[\w-]+", text, re.ASCII):
        raise UserError(f"{file} holds no id of a run of Weights & Biases: remove it")
    return text


Dashboard = TensorBoard | WeightsAndBiases


class _Writer:
    """The thread that writes to one dashboard, and the error that ended it, if any."""

    def __init__(self, board: Dashboard) -> None:
        self.name = board.name
        self.failure: str | None = None
        self._board = board
        self._writes: queue.Queue[tuple[Scalars, int, int] | None] = queue.Queue(_QUEUE_LENGTH)
        self._thread = threading.Thread(target=self._work, name=board.name, daemon=True)
        self._thread.start()

    def write(self, scalars: Scalars, iteration: int, samples: int) -> None:
        try:
            self._writes.put_nowait((scalars, iteration, samples))
        except queue.Full:
            self.failure = f"it is {_QUEUE_LENGTH} writes late"

    def close(self, seconds: float) -> None:
        try:
            self._writes.put(None, timeout=seconds)
            self._thread.join(seconds)
        except queue.Full:
            pass
        if self._thread.is_alive() and self.failure is None:
            self.failure = f"it did not end within {seconds:.0f} seconds"

    def _work(self) -> None:
        try:
            while (write := self._writes.get()) is not None:
                self._board.write(*write)
            self._board.close()
        except Exception as error:
            self.failure = type_and_message(error)


class Dashboards:
    """The open dashboards; a dashboard that fails is reported once and then dropped."""

    def __init__(self, log: Log) -> None:
        self._log = log
        self._open: list[_Writer] = []

    @property
    def any_open(self) -> bool:
        return bool(self._open)

    def open(self, flag: str, make: Callable[[], Dashboard]) -> None:
        """Add the dashboard that `make` returns, or print why `flag` has no effect."""
        try:
            board = make()
            self._open.append(_Writer(board))
            self._log.log_last(f"> {board.name}: {board.place}")
        except Exception as error:
            self._log.log_last(f"{flag} has no effect: {type_and_message(error)}")

    def write(self, scalars: Scalars, iteration: int, samples: int) -> None:
        named = {one_line(tag, _MAX_NAME_CHARS): value for tag, value in scalars.items()}
        for writer in self._open:
            writer.write(named, iteration, samples)
        self._leave_out_failed()

    def close(self, *, seconds: float = _CLOSE_SECONDS) -> None:
        """Wait until everything is written, for at most `seconds`."""
        for writer in self._open:
            writer.close(seconds)
        self._leave_out_failed()
        self._open.clear()

    def _leave_out_failed(self) -> None:
        for writer in tuple(self._open):
            if writer.failure is not None:
                self._open.remove(writer)
                self._log.log_last(f"{writer.name} is left out from here on: {writer.failure}")


def open_dashboards(
    config: ReportConfig, log: Log, arguments: Mapping[str, object], *, start_iteration: int = 0
) -> Dashboards:
    """Open the configured dashboards, on the rank that prints the log line."""
    dashboards = Dashboards(log)
    if not log.is_last:
        return dashboards
    start = config, arguments, start_iteration
    if config.tensorboard_dir is not None:
        dashboards.open("--tensorboard-dir", lambda: TensorBoard(*start))
    if config.wandb_project is not None:
        dashboards.open("--wandb-project", lambda: WeightsAndBiases(*start))
    return dashboards


def check_login(config: ReportConfig, log: Log) -> None:
    """Raise `UserError` if the rank that writes to Weights & Biases has no API key.

    As wandb does, look in the environment, wandb's settings and netrc. No server is contacted.
    """
    if config.wandb_project is None or not log.is_last:
        return
    import wandb

    try:
        from wandb.sdk.lib.wbauth import check_api_key, read_netrc_auth
    except ImportError:  # undocumented API; without it wandb's own start reports the error
        return
    flag = f"--wandb-project {config.wandb_project}"
    try:
        settings = wandb.setup().settings
        if settings.mode in _LOCAL_MODES or settings.identity_token_file:
            return
        key = settings.api_key or read_netrc_auth(host=settings.base_url)
    except (wandb.Error, ValueError) as error:
        raise UserError(f"{flag}: {error}") from error
    problem = check_api_key(key) if key else "there is no API key."
    if problem is not None:
        raise UserError(
            f"{flag}: {problem} On the machine of rank {log.rank}, which writes to Weights & "
            "Biases, run wandb login or set WANDB_API_KEY; WANDB_MODE=offline needs no key and "
            "keeps the run on disk"
        )
