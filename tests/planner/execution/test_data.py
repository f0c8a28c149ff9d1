import gzip
from dataclasses import replace

import numpy as np
import pytest
import torch

from planner.execution.data import samples
from planner.execution.data.formats import read_cifar10, read_idx, read_mnist, read_tokens
from planner.execution.data.samples import Batches, BatchInput, Position, Shard, check_dataset, open_dataset
from planner.execution.job import own_piece
from planner.execution.worker import LoadedShare, Loader
from planner.sharding.placement import Mesh, MeshAxis
from simulator.errors import InputError


def image(size=28, channels=1, batch=8, dtype=torch.float32):
    return BatchInput(name="image", kind="image", shape=(batch, channels, size, size), dtype=dtype)


LABEL = BatchInput(name="label", kind="label", shape=(8,), dtype=torch.int64, high=10)
FEATURES = BatchInput(name="x", kind="features", shape=(8, 784), dtype=torch.float64)
TARGET = BatchInput(name="y", kind="target", shape=(8, 1), dtype=torch.float64)
TOKENS = BatchInput(name="tokens", kind="tokens", shape=(4, 16), dtype=torch.int64, high=256)
NEXT = BatchInput(name="next", kind="next_tokens", shape=(4, 16), dtype=torch.int64, high=256)


def batches(name, *specs, seed=0):
    return Batches(dataset=open_dataset(name, specs, seed), seed=seed)


def idx(values):
    header = bytes((0, 0, 8, values.ndim)) + b"".join(size.to_bytes(4, "big") for size in values.shape)
    return header + values.tobytes()


@pytest.fixture
def mnist(tmp_path):
    rng = np.random.default_rng(0)
    images = rng.integers(0, 256, (12, 28, 28)).astype(np.uint8)
    labels = np.arange(12).astype(np.uint8) % 10
    (tmp_path / "train-images-idx3-ubyte.gz").write_bytes(gzip.compress(idx(images)))
    (tmp_path / "train-labels-idx1-ubyte").write_bytes(idx(labels))
    return tmp_path, images, labels


@pytest.fixture
def cifar(tmp_path):
    rng = np.random.default_rng(0)
    records = rng.integers(0, 256, (10, 3073)).astype(np.uint8)
    records[:, 0] = np.arange(10)
    for part in (1, 2):
        (tmp_path / f"data_batch_{part}.bin").write_bytes(records[(part - 1) * 5 : part * 5].tobytes())
    return tmp_path, records


class TestDigits:
    def test_default_for_images(self):
        data = batches(None, image(), LABEL)
        assert data.dataset.samples == 1797
        pixels = data.load(image(), 0)
        assert pixels.shape == (8, 1, 28, 28)
        assert pixels.min() >= -1
        assert pixels.max() <= 1
        assert set(data.load(LABEL, 0).tolist()) <= set(range(10))

    def test_without_importing_scikit_learn_every_number_is_its_own(self):
        datasets = pytest.importorskip("sklearn.datasets")
        whole = BatchInput(name="image", kind="image", shape=(1797, 1, 8, 8), dtype=torch.float64)
        dataset = open_dataset("digits", (whole,), 0)
        pixels = dataset.sample(whole, np.arange(1797)).numpy().reshape(1797, 8, 8)
        assert np.abs((pixels + 1) * 8 - datasets.load_digits().images).max() < 0.1

    def test_resized_with_channels(self):
        pixels = batches("digits", image(64, 3)).load(image(64, 3), 0)
        assert pixels.shape == (8, 3, 64, 64)
        assert torch.equal(pixels[:, 0], pixels[:, 2])

    def test_features_and_targets(self):
        data = batches(None, FEATURES, TARGET)
        assert data.load(FEATURES, 0).shape == (8, 784)
        labels = batches("digits", image(), LABEL).load(LABEL, 0)
        assert torch.equal(data.load(TARGET, 0)[:, 0], labels.double())

    def test_too_few_classes(self):
        few = BatchInput(name="label", kind="label", shape=(8,), dtype=torch.int64, high=5)
        with pytest.raises(InputError, match="10 classes"):
            batches("digits", image(), few).load(few, 0)


class TestCheck:
    """What cannot serve the network is found without training."""

    @pytest.mark.parametrize(
        ("name", "specs", "words"),
        [
            (None, (image(), LABEL), None),
            ("text", (TOKENS, NEXT), None),
            ("synthetic", (replace(LABEL, high=5), image()), None),
            ("digits", (image(), replace(LABEL, high=8)), "10 classes, the network 8; .*--data synthetic"),
            ("digits", (image(), replace(LABEL, shape=(8, 28, 28))), r"'label' .* shape \(\), .* wants \(28, 28\)"),
            ("digits", (replace(FEATURES, shape=(8, 50)),), "flattened square"),
            ("text", (TOKENS, replace(LABEL, high=2)), "text cannot feed input 'label'"),
            ("text", (replace(TOKENS, shape=(8,)),), r"shape \(8,\), only \(samples, tokens\)"),
        ],
    )
    def test_one_sample_of_every_input(self, name, specs, words):
        if words is None:
            check_dataset(open_dataset(name, specs, 0), specs)
            return
        with pytest.raises(InputError, match=words):
            check_dataset(open_dataset(name, specs, 0), specs)


class TestSharding:
    @pytest.mark.parametrize("shards", [1, 2, 4])
    @pytest.mark.parametrize("name", ["digits", "synthetic"])
    def test_shards_make_up_the_batch(self, shards, name):
        data = batches(name, image())
        whole = data.load(image(), 1792)
        parts = [data.load(image(), 1792, Shard(num_shards=shards, shard_id=i)) for i in range(shards)]
        assert torch.equal(torch.cat(parts), whole)

    def test_every_sample_once_an_epoch(self):
        data = batches("digits", image())
        rows = data._rows(0, 1797)
        assert sorted(rows) == list(range(1797))
        assert list(data._rows(1797, 1797)) != list(rows)

    def test_seed_decides_the_order(self):
        first, again, other = (batches("digits", LABEL, seed=s).load(LABEL, 0) for s in (1, 1, 2))
        assert torch.equal(first, again)
        assert not torch.equal(first, other)


class TestText:
    def test_next_tokens_follow(self):
        data = batches(None, TOKENS, NEXT)
        tokens, following = data.load(TOKENS, 0), data.load(NEXT, 0)
        assert torch.equal(tokens[:, 1:], following[:, :-1])

    def test_own_file(self, tmp_path):
        path = tmp_path / "a.txt"
        path.write_bytes(bytes(range(65, 65 + 17)))
        data = batches(f"text:{path}", TOKENS, NEXT)
        assert data.dataset.samples == 1
        assert data.load(NEXT, 0)[0].tolist() == list(range(66, 82))

    def test_too_short(self, tmp_path):
        path = tmp_path / "a.txt"
        path.write_text("short")
        with pytest.raises(InputError, match="5 bytes, a sample needs 17"):
            batches(f"text:{path}", TOKENS)

    def test_missing(self):
        with pytest.raises(InputError, match="does not exist"):
            batches("text:nowhere.txt", TOKENS)

    def test_small_vocabulary(self):
        small = BatchInput(name="tokens", kind="tokens", shape=(4, 16), dtype=torch.int64, high=32)
        with pytest.raises(InputError, match="vocabulary 32"):
            check_dataset(open_dataset("text", (small,), 0), (small,))


class TestTokenFiles:
    """Tokens stay on the disk; every format gives the same samples."""

    VALUES = (np.arange(100) * 7 % 251).astype(np.uint16)

    def written(self, folder, name):
        path = folder / name
        if name.endswith(".npy"):
            np.save(path, self.VALUES.astype(np.int32))
        elif name.startswith("header"):
            header = np.zeros(256, "<i4")
            header[:3] = 20240520, 1, len(self.VALUES)
            path.write_bytes(header.tobytes() + self.VALUES.astype("<u2").tobytes())
        else:
            path.write_bytes(self.VALUES.astype("<u4" if name.endswith(".u32") else "<u2").tobytes())
        return path

    @pytest.mark.parametrize("name", ["tokens.npy", "header.bin", "raw.bin", "raw.u32"])
    def test_every_format(self, tmp_path, name):
        path = self.written(tmp_path, name)
        assert isinstance(read_tokens(path), np.memmap)
        data = batches(f"tokens:{path}", TOKENS, NEXT)
        assert data.dataset.samples == 99 // 16
        rows = np.arange(6)
        assert data.dataset.sample(TOKENS, rows).flatten().tolist() == self.VALUES[:96].tolist()
        assert data.dataset.sample(NEXT, rows).flatten().tolist() == self.VALUES[1:97].tolist()

    @pytest.mark.parametrize(
        ("name", "cut", "words"),
        [
            ("tokens.npy", 3, "ends at byte 525, but 100 tokens from byte 128 need 528; the file is truncated"),
            ("tokens.npy", 460, "has no readable header at byte 0"),
            ("header.bin", 2, r"ends at byte 1222, but 100 tokens \(byte 8\) need 1224; the file is truncated"),
            ("raw.bin", 1, "has 199 bytes: its last token begins at byte 198 and should be 2 bytes long"),
            ("raw.u32", 1, "has 399 bytes: its last token begins at byte 396 and should be 4 bytes"),
            ("raw.bin", 200, "is empty"),
            ("raw.bin", 180, "has 10 tokens, a sample needs 17"),
        ],
    )
    def test_broken_files_are_named_with_the_offset(self, tmp_path, name, cut, words):
        path = self.written(tmp_path, name)
        path.write_bytes(path.read_bytes()[:-cut])
        with pytest.raises(InputError, match=rf"{name} {words}"):
            batches(f"tokens:{path}", TOKENS)

    def test_another_version(self, tmp_path):
        path = self.written(tmp_path, "header.bin")
        content = bytearray(path.read_bytes())
        content[4] = 9
        path.write_bytes(content)
        with pytest.raises(InputError, match="version 9 at byte 4, and only version 1 is read"):
            read_tokens(path)

    def test_no_numbers_of_tokens(self, tmp_path):
        np.save(tmp_path / "a.npy", np.zeros((4, 4), np.float32))
        with pytest.raises(InputError, match=r"holds float32 of shape \(4, 4\)"):
            read_tokens(tmp_path / "a.npy")

    def test_objects_are_not_unpickled(self, tmp_path):
        np.save(tmp_path / "a.npy", np.array([{}], object), allow_pickle=True)
        with pytest.raises(InputError, match="holds object"):
            read_tokens(tmp_path / "a.npy")

    @pytest.mark.parametrize(("name", "start"), [("raw.bin", 0), ("header.bin", 1024)])
    def test_a_token_beyond_the_vocabulary_is_named_with_its_offset(self, tmp_path, name, start):
        path = self.written(tmp_path, name)
        small = replace(TOKENS, high=200)
        place = int(np.flatnonzero(self.VALUES >= 200)[0])
        dataset = open_dataset(f"tokens:{path}", (small,), 0)
        with pytest.raises(InputError, match=rf"token {self.VALUES[place]} at byte {start + 2 * place}, .* 200 tokens"):
            dataset.sample(small, np.array([place // 16]))

    @pytest.mark.parametrize("name", ["raw.bin", "header.bin", "tokens.npy"])
    def test_all_tokens_are_looked_through_before_training(self, tmp_path, monkeypatch, name):
        path = self.written(tmp_path, name)
        spec = replace(TOKENS, high=50257)
        check_dataset(open_dataset(f"tokens:{path}", (spec,), 0), (spec,))
        content = bytearray(path.read_bytes())
        width = 4 if name.endswith(".npy") else 2
        content[-2 * width : -width] = (60000).to_bytes(width, "little")  # the last but one, in no first sample
        path.write_bytes(content)
        monkeypatch.setattr(samples, "PIECE", 7)
        dataset = open_dataset(f"tokens:{path}", (spec,), 0)
        with pytest.raises(InputError, match=rf"{name} has token 60000 at byte {len(content) - 2 * width}, .*50257"):
            check_dataset(dataset, (spec,))

    def test_missing(self):
        with pytest.raises(InputError, match=r"gone.bin. does not exist.*--data tokens:FILE"):
            batches("tokens:gone.bin", TOKENS)


START = Position()


class TestLoader:
    """Every rank loads its own piece of the same stream, from anywhere in it, ahead of time or not."""

    MESH = Mesh((MeshAxis("data", 2), MeshAxis("tensor", 2)))

    def loader(self, spec, placements, coordinates, *, ahead=0, position=START, name="digits", device="cpu"):
        return Loader(
            batches(name, spec),
            [LoadedShare(spec=spec, placements=placements)],
            self.MESH,
            coordinates,
            micro_batches=3,
            position=position,
            device=torch.device(device),
            ahead=ahead,
        )

    @pytest.mark.parametrize("device", ["cpu", "meta"])
    def test_what_goes_to_an_accelerator_is_pinned(self, device, monkeypatch):
        pinned = []
        monkeypatch.setattr(torch.Tensor, "pin_memory", lambda tensor: pinned.append(tensor) or tensor)
        (piece,) = self.loader(LABEL, (0, -1), (0, 0), device=device)(0, 0)
        assert piece.device.type == device
        assert len(pinned) == (device != "cpu")

    @pytest.mark.parametrize("placements", [(0, -1), (-1, 0), (0, 0), (-1, -1), (0, 3), (2, 3)])
    def test_pieces_make_up_the_batch(self, placements):
        whole = batches("digits", image()).load(image(), (2 * 3 + 1) * 8)
        for coordinates in ((0, 0), (0, 1), (1, 0), (1, 1)):
            (piece,) = self.loader(image(), placements, coordinates)(2, 1)
            assert torch.equal(piece, own_piece(whole, self.MESH, placements, coordinates))

    @pytest.mark.parametrize("ahead", [1, 2, 7])
    def test_prepared_in_a_thread_it_is_the_same(self, ahead):
        plain, early = (self.loader(LABEL, (0, -1), (1, 0), ahead=n) for n in (0, ahead))
        places = [(step, i) for step in range(4) for i in range(3)]
        for place in [places[0], *places, (7, 0), (7, 1), (2, 0)]:
            assert torch.equal(plain(*place)[0], early(*place)[0])
        early.close()

    @pytest.mark.parametrize("ahead", [0, 2])
    def test_a_resumed_run_goes_on_where_the_other_stopped(self, ahead):
        unbroken = self.loader(LABEL, (0, -1), (0, 0))
        resumed = self.loader(LABEL, (0, -1), (0, 0), position=Position(step=5, sample=5 * 3 * 8), ahead=ahead)
        for step in (5, 6):
            for i in range(3):
                assert torch.equal(unbroken(step, i)[0], resumed(step, i)[0])
        resumed.close()

    def test_another_batch_size_takes_the_samples_behind(self):
        small = replace(LABEL, shape=(4,))
        resumed = self.loader(small, (-1, -1), (0, 0), position=Position(step=5, sample=120))
        following = batches("digits", LABEL).load(LABEL, 120)
        assert torch.equal(torch.cat([resumed(5, i)[0] for i in range(2)]), following)

    def test_what_goes_wrong_ahead_is_raised_where_it_is_wanted(self, tmp_path):
        path = tmp_path / "tokens.bin"
        path.write_bytes(np.arange(100, dtype="<u2").tobytes())
        small = replace(TOKENS, shape=(1, 16), high=90)
        loader = self.loader(small, (-1, -1), (0, 0), ahead=4, name=f"tokens:{path}")
        with pytest.raises(InputError, match="has token 9. at byte"):
            [loader(step, i) for step in range(2) for i in range(3)]
        loader.close()


class TestMnist:
    def test_read(self, mnist):
        folder, images, labels = mnist
        found = read_mnist(folder)
        assert np.array_equal(found[0], images)
        assert np.array_equal(found[1], labels)
        assert batches(f"mnist:{folder}", image(), LABEL).load(image(), 0).shape == (8, 1, 28, 28)

    def test_truncated(self, mnist):
        folder, _, labels = mnist
        (folder / "train-labels-idx1-ubyte").write_bytes(idx(labels)[:-3])
        with pytest.raises(InputError, match=r"train-labels-idx1-ubyte has 17 bytes.*need 20.*truncated"):
            read_mnist(folder)

    def test_truncated_gzip(self, mnist):
        path = mnist[0] / "train-images-idx3-ubyte.gz"
        path.write_bytes(path.read_bytes()[:-20])
        with pytest.raises(InputError, match=r"within its \d+ bytes, behind byte \d+ of what it holds; copy"):
            read_mnist(mnist[0])

    @pytest.mark.parametrize("content", [b"", b"\0\0", b"\0\0\x0d\x01\0\0\0\x01", b"GIF89a", b"\0\0\x08\x02\0\0\0\x01"])
    def test_not_idx(self, tmp_path, content):
        path = tmp_path / "file"
        path.write_bytes(content)
        with pytest.raises(InputError, match="byte"):
            read_idx(path)

    def test_absurd_dims_are_refused_without_allocating(self, tmp_path):
        path = tmp_path / "file"
        path.write_bytes(b"\0\0\x08\x04" + b"\xff" * 16)
        with pytest.raises(InputError, match="truncated"):
            read_idx(path)

    def test_empty_folder(self, tmp_path):
        with pytest.raises(InputError, match="holds no train-images"):
            read_mnist(tmp_path)

    def test_images_and_labels_of_different_sets(self, mnist):
        (mnist[0] / "train-labels-idx1-ubyte").write_bytes(idx(np.zeros(3, np.uint8)))
        with pytest.raises(InputError, match="do not belong together"):
            read_mnist(mnist[0])

    def test_impossible_label(self, mnist):
        labels = mnist[2].copy()
        labels[5] = 99
        (mnist[0] / "train-labels-idx1-ubyte").write_bytes(idx(labels))
        with pytest.raises(InputError, match="train-labels-idx1-ubyte has label 99 at byte 13 of what it holds"):
            read_mnist(mnist[0])

    @pytest.mark.parametrize("shape", [(0, 28, 28), (12, 0, 0)])
    def test_nothing_in_a_file(self, tmp_path, shape):
        (tmp_path / "train-images-idx3-ubyte").write_bytes(idx(np.zeros(shape, np.uint8)))
        (tmp_path / "train-labels-idx1-ubyte").write_bytes(idx(np.zeros(shape[0], np.uint8)))
        with pytest.raises(InputError, match=r"train-images-idx3-ubyte has dims \(.*\) at byte 4, which hold nothing"):
            read_mnist(tmp_path)


class TestCifar:
    def test_read(self, cifar):
        folder, records = cifar
        images, labels = read_cifar10(folder)
        assert images.shape == (10, 3, 32, 32)
        assert labels.tolist() == list(range(10))
        assert np.array_equal(images.reshape(10, -1), records[:, 1:])
        assert batches(f"cifar10:{folder}", image(32, 3), LABEL).load(image(32, 3), 0).shape == (8, 3, 32, 32)

    def test_truncated_names_file_and_offset(self, cifar):
        path = cifar[0] / "data_batch_2.bin"
        path.write_bytes(path.read_bytes()[:-100])
        with pytest.raises(InputError, match=r"data_batch_2.bin.*last record begins at byte 12292"):
            read_cifar10(cifar[0])

    def test_impossible_label(self, cifar):
        path = cifar[0] / "data_batch_1.bin"
        content = bytearray(path.read_bytes())
        content[3073] = 77
        path.write_bytes(bytes(content))
        with pytest.raises(InputError, match="label 77 at byte 3073"):
            read_cifar10(cifar[0])

    def test_pickles_are_not_read(self, tmp_path):
        (tmp_path / "data_batch_1").write_bytes(b"")
        with pytest.raises(InputError, match="binary version"):
            read_cifar10(tmp_path)


@pytest.mark.parametrize("name", ["imagenet", "mnist", "cifar10:", "digits2"])
def test_unknown_data_set(name):
    with pytest.raises(InputError, match="is not one of"):
        batches(name, image())


@pytest.mark.parametrize(("name", "spec"), [("digits", TOKENS), ("text", image())])
def test_data_of_the_wrong_kind(name, spec):
    with pytest.raises(InputError, match="cannot feed"):
        batches(name, spec)


def test_scikit_learn_missing(monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(InputError, match=r"meshwright\[data\]"):
        batches("digits", image())


def test_without_scikit_learn_the_default_is_synthetic(monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert "synthetic" in open_dataset(None, (image(),), 0).description
