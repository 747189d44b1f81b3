"""Work shared out among threads."""

import os
import threading
import time

import pytest
import torch

from polyad.model.kernels.cpu.experts import parallel_for


def test_every_item_is_taken_once(threads):
    taken = []
    parallel_for(lambda mine: taken.extend(mine), list(range(50)))
    assert sorted(taken) == list(range(50))


def test_so_many_threads_work_at_once_and_each_computes_alone(threads):
    all_here = threading.Barrier(threads, timeout=60)
    seen = []

    def work(mine):
        all_here.wait()
        seen.append((threading.get_ident(), torch.get_num_threads()))
        list(mine)

    for _ in range(2):
        parallel_for(work, [0])
    assert [number for _, number in seen] == [1] * (2 * threads)
    assert len({thread for thread, _ in seen}) == threads  # the same ones the second time
    assert torch.get_num_threads() == threads


def test_threads_that_begin_later_compute_with_all(threads):
    parallel_for(list, [0])
    numbers = []
    later = threading.Thread(target=lambda: numbers.append(torch.get_num_threads()))
    later.start()
    later.join()
    assert numbers == [threads]


def test_an_error_comes_out_when_all_threads_have_ended(threads):
    ended = []

    def work(mine):
        for item in mine:
            if item == 0:
                raise ValueError("item 0")
            time.sleep(0.01)
        ended.append(1)

    with pytest.raises(ValueError, match="item 0"):
        parallel_for(work, list(range(20)))
    assert len(ended) == threads - 1
    parallel_for(list, [1, 2])  # and the threads are still there


@pytest.mark.parametrize("outer", [torch.enable_grad, torch.no_grad, torch.inference_mode])
def test_results_are_written_in_any_mode(threads, outer):
    with outer():
        weight = torch.ones(4, 4, requires_grad=True)
        out = torch.zeros(6, 4, 4)

        def work(mine):
            for item in mine:
                torch.mm(weight, weight, out=out[item])

        parallel_for(work, range(6))
        assert (out == 4).all()


def test_a_forked_process_has_threads_of_its_own(threads):
    parallel_for(list, [1])
    pid = os.fork()
    if pid == 0:
        taken = []
        parallel_for(lambda mine: taken.extend(mine), [1, 2])
        os._exit(0 if sorted(taken) == [1, 2] else 1)
    until = time.monotonic() + 60
    while (done := os.waitpid(pid, os.WNOHANG)) == (0, 0):
        if time.monotonic() > until:
            os.kill(pid, 9)
            os.waitpid(pid, 0)
            pytest.fail("the forked process waits for threads that it does not have")
        time.sleep(0.01)
    assert done[1] == 0
