"""Client actors of tests, and what a run on them comes to."""

from pathlib import Path

import ray
from helpers import run, simulate

from rayfl.engine.files import checksum
from rayfl.engine.on_ray.actors import Crew
from rayfl.engine.on_ray.pool import RayPool


def crew_of(group, bundles):
    return Crew(group, bundles, cpus=1, gpus=0, threads=1)


def resized(pool, group, count):
    """The pool with so many actors."""
    pool.deaths, pool.deadline = 0, 60.0
    while len(pool.slots) > count:
        ray.kill(pool.slots.pop().actor)
    bundles = range(len(pool.slots), count)
    crew = crew_of(group, bundles)
    pool.slots += RayPool(pool.refs, crew, [crew.start(bundle) for bundle in bundles]).slots
    return pool


def loaded(pool, experiment):
    """Return a function that makes the pool the executor of an experiment."""

    def make(recipe):
        pool.load([ray.put(experiment.data.arrays()), ray.put(recipe)])
        everyone_has_loaded(pool)
        return pool

    return make


def everyone_has_loaded(pool):
    ray.get([slot.loading for slot in pool.slots if slot.loading is not None])


def result(simulation):
    """All lines, and the state's and every carry's bits."""
    lines = run(simulation)
    client_states = {str(id): simulation.client_states.get(id) for id in sorted(simulation.client_states.files)}
    return lines, checksum(simulation.state), checksum(client_states)


def on_ray(pool, experiment, folder):
    return simulate(experiment, folder, loaded(pool, experiment))


def public_memory(host):
    """Return whether a host's public pixels and labels are in the node's shared memory."""
    samples, regions = host.worker.public.samples, []
    for line in Path("/proc/self/maps").read_text().splitlines():
        if "plasma" in line:
            start, _, end = line.partition(" ")[0].partition("-")
            regions.append(range(int(start, 16), int(end, 16)))
    return [any(samples[name].data_ptr() in region for region in regions) for name in ("x", "y")]
