"""How the clients of a round are dealt to devices and to chunks."""

import heapq

import numpy as np

from fedjax_pfl import execution as execution_lib


def by_work(index: np.ndarray, work: np.ndarray, devices: int) -> np.ndarray:
    """Deals rows to devices so that all end at nearly the same time.

    The client with most work comes first, and each goes to the device with the least
    work. `index` int[C] has -1 for padding, then clients in their order on a device,
    and `work` int[C] is what each computes. `devices` is D, a divisor of C. Returns
    int[C], the rows of one device after those of another, the same number of each.
    """
    if devices == 1:
        return index
    each = len(index) // devices
    found: list[list[int]] = [[] for _ in range(devices)]
    # A load and its device as one number, load * D + device
    loads = list(range(devices))
    added = np.where(index < 0, 0, work).astype(np.int64) * devices
    places = np.argsort(-added, kind="stable")
    for place, more in zip(places.tolist(), added[places].tolist(), strict=True):
        device = loads[0] % devices
        found[device].append(place)
        if len(found[device]) < each:
            heapq.heapreplace(loads, loads[0] + more)
        else:
            heapq.heappop(loads)
    return index[np.sort(np.array(found), axis=1).reshape(-1)]


def at_home(
    index: np.ndarray, home: np.ndarray, alike: np.ndarray, devices: int
) -> np.ndarray:
    """Changes the places of clients of equal work so that most train at home.

    Every place keeps its work, so that the devices stay as even as they were dealt.

    Args:
        index: int[C], the clients 0..n - 1 or -1 for padding, in places of one of D
            devices after those of another.
        home: int[n], the device that has each client's row.
        alike: int[F, n], what clients must have in common to change places.
        devices: D.

    Returns:
        int[C], the same clients, padding where it was.

    Examples:
        >>> home, alike = np.array([1, 0, 1, 0]), np.array([[7, 7, 7, 9]])
        >>> at_home(np.array([0, 1, 2, 3]), home, alike, 2).tolist()
        [1, 2, 0, 3]
    """
    place = np.flatnonzero(index >= 0)
    client, device = index[place], place // (len(index) // devices)
    order = np.lexsort(alike[:, client])
    line = alike[:, client[order]]
    kind = np.zeros(len(client), np.int64)
    kind[order[1:]] = np.cumsum((line[:, 1:] != line[:, :-1]).any(0))
    wanted, offered = kind * devices + device, kind * devices + home[client]
    out = np.full_like(index, -1)
    # Those that stay, then the others in the order of their kinds, as many places each
    for of_place, of_client in zip(
        _shared(wanted, offered), _shared(offered, wanted), strict=True
    ):
        out[place[of_place]] = client[of_client]
    return out


def _shared(key: np.ndarray, other: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """(indices of `key` that pair with an equal value in `other`, the rest).

    Both are int[n]. A value pairs as often as the rarer of the two has it. Each part is
    in the order of `key`, and together they are 0..n - 1.
    """
    order = np.argsort(key, kind="stable")
    line = key[order]
    count = np.bincount(other, minlength=int(line[-1]) + 1)
    number = np.arange(len(key)) - np.searchsorted(line, line)
    is_shared = number < count[line]
    return order[is_shared], order[~is_shared]


def choose_chunk(
    num_steps: np.ndarray,
    *,
    step_macs: float,
    min_chunk: int = 0,
    devices: int = 1,
    is_gpu: bool = False,
) -> tuple[int, float]:
    """Chooses the chunk that an accelerator computes fastest for given cohorts.

    A wide chunk makes a client's step cheaper (`execution.step_costs`) but executes
    more steps, because all of its clients run as long as the longest. Only widths of
    known cost are taken, or all rows of a device at once (`execution.is_priced`): then
    a step costs at least that of the next wider known chunk, and a client of it at
    least one of the next narrower. Of several devices the slowest counts.

    Args:
        num_steps: int[T, C], steps of the clients in T typical cohorts, without padding
            rows, in any order.
        step_macs: Multiply-accumulates of a client's step, as in `step_costs`.
        min_chunk: The least chunk, 0 = any. It need not be a known width.
        devices: Devices that share the rows.
        is_gpu: Whether they are GPUs.

    Returns:
        (the cheapest chunk, the largest of equally cheap ones; the predicted fraction
        of real steps in what the devices execute if each does as much as the slowest).
    """
    steps = np.sort(num_steps, axis=-1)
    num_rows = steps.shape[-1]
    per_device = -(-num_rows // devices)

    def executed(chunk: int) -> float:
        """The steps of the slowest device, as rows are dealt in `Planner.drawn`."""
        if chunk == 1:
            return np.maximum(steps.sum(-1) / devices, steps[..., -1]).sum()
        # The device with the last row of each chunk; padding rows come first.
        last = num_rows - 1 - np.arange(-(-per_device // chunk)) * chunk * devices
        return steps[..., last].sum() * chunk

    known = execution_lib.step_costs(step_macs, is_gpu)

    def cost(chunk: int) -> float:
        """The slowest device's cycles; a width that is not known costs no less."""
        narrower = chunk * known[max(w for w in known if w <= chunk)]
        wider = min((w for w in known if w >= chunk), default=chunk)
        step = max(narrower, wider * known.get(wider, 0))
        return executed(chunk) / chunk * step

    least = min(max(min_chunk, 1), per_device)
    widths = [width for width in known if width < per_device]
    if execution_lib.is_priced(per_device, step_macs, known):
        widths.append(per_device)
    candidates = {max(width, least) for width in widths}
    best = min(candidates, key=lambda chunk: (cost(chunk), -chunk))
    return best, float(steps.sum() / max(devices * executed(best), 1))
