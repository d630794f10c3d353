"""A checkpoint that is not as it was written is never restored, and passed over by name."""

from __future__ import annotations

import json
import os
import shutil
import warnings
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest
from google_crc32c import value as crc32c
from helpers.engines import mirrored, parts

import mirrax as mx
from mirrax.errors import DataLossError
from mirrax.train import Checkpoint, CheckpointManager, latest_checkpoint

pytestmark = pytest.mark.slow

MANIFEST = "mirrax.json"


class Saved:
    """Two checkpoints of one training, on disk once for the whole file."""

    def __init__(self, directory):
        self.strategy = mirrored(2)
        with self.strategy.scope():
            self.v = mx.Variable(jnp.zeros(4))
            self.large = mx.Variable(jnp.zeros(70_000))
        self.iterator = iter(mx.data.Dataset.range(9))
        self.checkpoint = Checkpoint(
            v=self.v, large=self.large, it=self.iterator, epoch=0, key=jnp.zeros(2)
        )
        self.directory = directory
        for step in (1, 2):
            self.set(step)
            next(self.iterator)
            self.checkpoint.save(directory / "ckpt")
        self.checkpoint.sync()
        self.sound = {p: p.read_bytes() for p in self.files()}
        self.as_saved = self.now()

    def set(self, step):
        self.v.assign(jnp.full(4, float(step)))
        self.large.assign(jnp.full(70_000, float(step)))
        self.checkpoint.epoch = step
        self.checkpoint.key = jnp.full(2, float(step))

    def files(self):
        return sorted(p for p in self.directory.rglob("*") if p.is_file())

    def repair(self):
        for path in self.files():
            if path not in self.sound:
                path.unlink()
        for path, content in self.sound.items():
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(content)

    def now(self):
        """All that a restore could change."""
        return (
            parts(self.strategy, self.v),
            [sum(part) for part in parts(self.strategy, self.large)],
            self.iterator.get_state(),
            self.checkpoint.epoch,
            self.checkpoint.key.tolist(),
            int(self.checkpoint.save_counter.numpy()),
        )


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    return Saved(tmp_path_factory.mktemp("damage"))


@pytest.fixture
def saved(whole):
    whole.repair()
    whole.set(9)
    return whole


def files_of(saved, number=2):
    place = saved.directory / f"ckpt-{number}"
    return [p for p in saved.files() if p.is_relative_to(place)]


def assert_refused(saved, name, error: type[Exception] = DataLossError):
    """`restore` of the newest raises, says which file, and changes nothing."""
    before = saved.now()
    place = saved.directory / "ckpt-2"
    with pytest.raises(error) as caught:
        saved.checkpoint.restore(place)
    assert str(place) in str(caught.value)
    if error is DataLossError:
        assert f"{name} is not as it was written. Restore" in str(caught.value)
    with pytest.raises(error):
        mx.train.load_checkpoint(place)
    assert saved.now() == before


def assert_refused_or_right(saved):
    """`restore` of the newest raises and changes nothing, or does not need what is damaged."""
    before = saved.now()
    place = saved.directory / "ckpt-2"
    try:
        saved.checkpoint.restore(place).assert_consumed()
    except DataLossError as error:
        assert f"{place} is damaged: " in str(error)
        assert saved.now() == before
        return False
    assert saved.now() == saved.as_saved
    saved.set(9)
    return True


def assert_passed_over(saved, match=r"ckpt-2 is damaged: "):
    """Whoever looks for the newest checkpoint takes the one before, and says why."""
    older = str(saved.directory / "ckpt-1")
    with pytest.warns(UserWarning, match=match):
        assert latest_checkpoint(saved.directory) == older
    with pytest.warns(UserWarning, match=match):
        manager = CheckpointManager(saved.checkpoint, saved.directory, 3)
        assert manager.latest_checkpoint == older
    with pytest.warns(UserWarning, match=match):
        manager = CheckpointManager(saved.checkpoint, saved.directory, 3)
        assert manager.restore_or_initialize() == older
    assert parts(saved.strategy, saved.v) == [[1.0] * 4] * 2
    assert saved.checkpoint.epoch == 1
    assert next(saved.iterator) == 1


def relative(path):
    return str(
        path.relative_to(path.parents[[p.name for p in path.parents].index("ckpt-2")])
    )


# Files that are cut, emptied, removed, changed -------------------------------------------


def test_the_files_are_sound_to_begin_with(saved):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        newest = latest_checkpoint(saved.directory)
    assert newest == str(saved.directory / "ckpt-2")
    saved.checkpoint.restore(newest).assert_consumed()
    assert saved.checkpoint.epoch == 2
    assert len(files_of(saved)) >= 3


def test_every_file_cut_at_every_kind_of_length(saved):
    for path in files_of(saved):
        size = path.stat().st_size
        for length in sorted({0, 1, size // 2, size - 1}):
            path.write_bytes(saved.sound[path][:length])
            assert_refused(saved, relative(path))
        saved.repair()


def test_every_file_made_longer(saved):
    for path in files_of(saved):
        path.write_bytes(saved.sound[path] + b"\0")
        assert_refused(saved, relative(path))
        saved.repair()


def test_every_file_with_one_byte_changed(saved):
    rng = np.random.default_rng(0)
    for path in files_of(saved):
        content = saved.sound[path]
        places = {0, len(content) - 1, *rng.integers(0, len(content), 4).tolist()}
        for place in places:
            changed = bytearray(content)
            changed[place] ^= int(rng.integers(1, 256))
            path.write_bytes(changed)
            is_right = assert_refused_or_right(saved)
            assert not is_right or path.name != MANIFEST
            with pytest.warns(UserWarning, match="ckpt-2 is damaged"):
                older = str(saved.directory / "ckpt-1")
                assert latest_checkpoint(saved.directory) == older
        saved.repair()


def test_any_byte_of_the_data_changed(saved):
    path = max(files_of(saved), key=lambda p: p.stat().st_size)
    content = saved.sound[path]
    # Where the numbers are: 70 000 times 2.0.
    first = content.index(np.full(100, 2.0, "float32").tobytes())
    for place in (first, first + 1, first + 139_999, first + 279_999):
        changed = bytearray(content)
        changed[place] ^= 1
        path.write_bytes(changed)
        assert not assert_refused_or_right(saved)


def test_every_file_removed(saved):
    for path in files_of(saved):
        path.unlink()
        if path.name == MANIFEST:
            assert_refused(saved, "", FileNotFoundError)
        else:
            assert_refused(saved, relative(path))
        saved.repair()


@pytest.mark.parametrize("damage", ["cut", "emptied", "removed", "changed"])
def test_a_damaged_data_file_is_passed_over(damage, saved):
    path = max(files_of(saved), key=lambda p: p.stat().st_size)
    content = bytearray(saved.sound[path])
    content[len(content) // 2] ^= 1
    if damage == "removed":
        path.unlink()
    else:
        new = {"cut": content[:-1], "emptied": b"", "changed": content}[damage]
        path.write_bytes(new)
    assert_passed_over(saved)


def test_each_damaged_file_is_passed_over(saved):
    for path in files_of(saved):
        path.write_bytes(saved.sound[path][:-1])
        assert_passed_over(saved, rf"ckpt-2 is damaged: {relative(path)} is not")
        saved.repair()


def test_the_arrays_removed_altogether(saved):
    shutil.rmtree(saved.directory / "ckpt-2" / "arrays")
    assert_refused(saved, files_name(saved))
    assert_passed_over(saved)


def files_name(saved):
    """The first file that the manifest of the newest names."""
    manifest = json.loads(saved.sound[saved.directory / "ckpt-2" / MANIFEST])
    return next(iter(manifest["content"]["files"]))


def test_all_checkpoints_damaged(saved):
    for number in (1, 2):
        path = max(files_of(saved, number), key=lambda p: p.stat().st_size)
        path.write_bytes(b"")
    with pytest.warns(UserWarning) as caught:
        assert latest_checkpoint(saved.directory) is None
    assert ["ckpt-2 is damaged" in str(w.message) for w in caught] == [True, False]
    called = []
    with pytest.warns(UserWarning) as caught:
        manager = CheckpointManager(
            saved.checkpoint, saved.directory, 3, init_fn=lambda: called.append(1)
        )
        assert manager.restore_or_initialize() is None
    told = [str(w.message) for w in caught]
    assert "ckpt-2 is damaged" in told[0] and "ckpt-1 is damaged" in told[1]
    assert called == [1]


# The manifest ---------------------------------------------------------------------------


def write_manifest(saved, content):
    """A manifest with this content and the checksum that belongs to it."""
    path = saved.directory / "ckpt-2" / MANIFEST
    (checksum,) = json.loads(path.read_text()).keys() - {"content"}
    whole = {checksum: crc32c(json.dumps(content).encode()), "content": content}
    path.write_text(json.dumps(whole))


@pytest.mark.parametrize(
    "text",
    [
        b"garbage",
        b"\xff\xfe\x00",
        b"null",
        b"[]",
        b"5",
        b'"text"',
        b"{}",
        b'{"content": {}}',
        b'{"content": {}, "checksum": 0}',
        b'{"checksum": 1, "content": {"format": 1}}',
        b"[" * 5000,
    ],
    ids=lambda text: text[:20].decode(errors="replace"),
)
def test_a_manifest_that_is_something_else(text, saved):
    (saved.directory / "ckpt-2" / MANIFEST).write_bytes(text)
    assert_refused(saved, MANIFEST)
    assert_passed_over(saved)


def test_a_manifest_of_another_checkpoint(saved):
    shutil.copy(
        saved.directory / "ckpt-1" / MANIFEST, saved.directory / "ckpt-2" / MANIFEST
    )
    with pytest.raises(DataLossError, match="ckpt-2 is damaged: "):
        saved.checkpoint.restore(saved.directory / "ckpt-2")


def test_a_newer_format_is_told_apart_from_damage(saved):
    path = saved.directory / "ckpt-2" / MANIFEST
    content = json.loads(path.read_text())["content"]
    write_manifest(saved, {**content, "format": 99})
    before = saved.now()
    with pytest.raises(
        ValueError, match=r"ckpt-2 was written by a newer mirrax \(format 99.*Update"
    ):
        saved.checkpoint.restore(path.parent)
    assert saved.now() == before
    assert_passed_over(saved, "ckpt-2 was written by a newer mirrax")


def test_a_manifest_without_its_fields(saved):
    write_manifest(saved, {"hello": 1})
    assert_refused(saved, MANIFEST)


GONE = "gone"


def _changed(content, *places, to):
    """`content` with another value at some place; without it if that is `GONE`."""
    copy = json.loads(json.dumps(content))
    inner = copy
    for place in places[:-1]:
        inner = inner[place]
    if to is GONE:
        del inner[places[-1]]
    else:
        inner[places[-1]] = to
    return copy


@pytest.mark.parametrize(
    ("places", "to"),
    [
        (("sequence",), GONE),
        (("sequence",), "first"),
        (("saved_at",), None),
        (("arrays",), GONE),
        (("arrays",), []),
        (("values",), 5),
        (("files",), GONE),
        (("files",), {"arrays": 3}),
        (("files",), {"../../secret": [3, 4]}),
        (("arrays", "v"), 5),
        (("arrays", "v", "shape"), GONE),
        (("arrays", "v", "shape"), [-4]),
        (("arrays", "v", "shape"), 4),
        (("arrays", "v", "dtype"), GONE),
        (("arrays", "v", "dtype"), "float99"),
        (("arrays", "v", "crc"), GONE),
        (("arrays", "v", "at"), GONE),
        (("arrays", "v", "at"), -1),
        (("arrays", "v", "key"), {"impl": 3}),
    ],
    ids=str,
)
def test_a_crafted_manifest_is_a_damaged_one(places, to, saved):
    path = saved.directory / "ckpt-2" / MANIFEST
    content = json.loads(path.read_text())["content"]
    write_manifest(saved, _changed(content, *places, to=to))
    assert_refused(saved, MANIFEST)
    assert_passed_over(saved)


@pytest.mark.parametrize("at", [4, 10**6])
def test_a_manifest_that_points_elsewhere(at, saved):
    path = saved.directory / "ckpt-2" / MANIFEST
    content = json.loads(path.read_text())["content"]
    write_manifest(saved, _changed(content, "arrays", "v", "at", to=at))
    with pytest.raises(DataLossError, match="the array 'v' is not as it was written"):
        saved.checkpoint.restore(path.parent)


def test_files_that_others_have_put_there_do_no_harm(saved):
    (saved.directory / "ckpt-2" / "notes.txt").write_text("mine")
    (saved.directory / "ckpt-2" / "arrays" / ".DS_Store").write_text("x")
    (saved.directory / "checkpoint").write_text("model_checkpoint_path: 'ckpt-1'")
    (saved.directory / "ckpt-7").mkdir()
    try:
        assert latest_checkpoint(saved.directory) == str(saved.directory / "ckpt-2")
        saved.checkpoint.restore(saved.directory / "ckpt-2").assert_consumed()
        assert saved.checkpoint.epoch == 2
    finally:
        (saved.directory / "ckpt-7").rmdir()


# A manager that has seen better days -----------------------------------------------------


def damage(path):
    data = [p for p in Path(path, "arrays").rglob("*") if p.is_file()]
    file = max(data, key=lambda p: p.stat().st_size)
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)


@pytest.mark.parametrize("how", ["damaged", "deleted"])
def test_what_happened_after_the_manager_has_saved_it(how, tmp_path):
    v = mx.Variable(jnp.full(100_000, 1.0))
    manager = CheckpointManager(Checkpoint(v=v), tmp_path, 5)
    older = manager.save()
    v.assign(jnp.full(100_000, 2.0))
    newer = manager.save()
    assert newer is not None and manager.latest_checkpoint == newer
    if how == "damaged":
        damage(newer)
    else:
        shutil.rmtree(newer)
    with pytest.warns(UserWarning, match="ckpt-2"):
        assert manager.restore_or_initialize() == older
    assert set(v.numpy()) == {1.0}
    if how == "deleted":
        assert manager.latest_checkpoint == older
        return
    with pytest.warns(UserWarning, match="ckpt-2"):
        assert manager.latest_checkpoint == older


def test_a_damaged_checkpoint_is_replaced_by_a_sound_one(tmp_path):
    v = mx.Variable(jnp.full(100_000, 1.0))
    manager = CheckpointManager(Checkpoint(v=v), tmp_path, 5)
    for _ in range(2):
        path = manager.save()
    manager.sync()
    assert path is not None
    damage(path)
    again = CheckpointManager(Checkpoint(v=v), tmp_path, 5)
    with pytest.warns(UserWarning, match="ckpt-2 is damaged"):
        again.restore_or_initialize()
    v.assign(jnp.full(100_000, 5.0))
    assert again.save() == path
    assert again.latest_checkpoint == latest_checkpoint(tmp_path) == path
    assert set(mx.train.load_checkpoint(path)["v"]) == {5.0}
    assert sorted(os.listdir(tmp_path)) == ["ckpt-1", "ckpt-2"]


def test_saving_beside_a_damaged_checkpoint(saved):
    (saved.directory / "ckpt-2" / MANIFEST).write_text("garbage")
    path = saved.checkpoint.write(saved.directory / "other")
    try:
        assert mx.train.load_checkpoint(path)["epoch"] == 9
    finally:
        shutil.rmtree(path)
