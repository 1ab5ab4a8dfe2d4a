"""Your own arrays with client and task ids: three shops, two seasons."""

import numpy as np

import everfed as ef


def sales(n: int, season: int, shop: int, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Which of two products sells; what decides it turns with the season."""
    random = np.random.default_rng([seed, season, shop])
    x = random.normal(shop * 0.3, 1, (n, 5)).astype(np.float32)
    slope = np.array([1, -1, 0.5, 0, 0]) if season == 0 else np.array([0, -1, 0.5, 1, 0])
    return x, (x @ slope + 0.1 * random.normal(size=n) > 0).astype(int)


def main() -> ef.Run:
    parts = [(*sales(200, t, i, seed=1), t, i) for t in (0, 1) for i in (0, 1, 2)]
    tests = [(*sales(100, t, i, seed=2), t) for t in (0, 1) for i in (0, 1, 2)]
    data = ef.data.arrays(
        np.concatenate([x for x, *_ in parts]),
        np.concatenate([y for _, y, *_ in parts]),
        task=np.concatenate([np.full(len(x), t) for x, _, t, _ in parts]),
        client=np.concatenate([np.full(len(x), i) for x, _, _, i in parts]),
        test=(np.concatenate([x for x, *_ in tests]), np.concatenate([y for _, y, _ in tests])),
        test_task=np.concatenate([np.full(len(x), t) for x, _, t in tests]),
        tasks=["winter", "summer"],
        name="sales",
    )
    stream = ef.streams.given(data, rounds=10)
    model = ef.models.mlp(5, 16, 2)
    return ef.run(ef.methods.cfl_coreset(size=50), stream, model, local=ef.Local(lr=0.2), seed=0)


if __name__ == "__main__":
    run = main()
    print(run)
    print(run.matrix.round(2))
