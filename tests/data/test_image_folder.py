"""Folders of images: classes, both layouts, sizes, and errors for invalid files."""

from pathlib import Path

import numpy as np
import pytest
from helpers import message, read_data
from PIL import Image

from rayfl.data import Images
from rayfl.data.folder import Folder

BROKEN = (
    "data.root: {} images cannot be used. Allowed: none. Hint: repair or remove them, or set data.size if their sizes "
    "differ:"
)


def save(folder: Path, name: str, value, mode="RGB", size=(4, 4)):
    folder.mkdir(parents=True, exist_ok=True)
    Image.new(mode, size, value).save(folder / name)


@pytest.fixture
def flowers(tmp_path):
    """train: 2 roses and 1 tulip; test: 1 tulip. Red says which."""
    save(tmp_path / "train" / "rose", "b.png", (2, 0, 7))
    save(tmp_path / "train" / "rose", "a.PNG", (1, 0, 7))
    save(tmp_path / "train" / "tulip", "c.bmp", (3, 0, 7))
    save(tmp_path / "test" / "tulip", "d.png", (4, 0, 7))
    (tmp_path / "train" / "rose" / "notes.txt").write_text("no image")
    (tmp_path / "train" / ".cache").mkdir()
    return tmp_path


def test_a_folder_of_images(flowers):
    data = read_data(name="folder", root=str(flowers))
    assert (data.shape, data.classes, data.class_names) == ((3, 4, 4), 2, ("rose", "tulip"))
    assert data.offers == {"input": (3, 4, 4), "classes": 2, "class_names": ("rose", "tulip")}
    arrays = data.arrays()
    assert arrays.train["x"].dtype == np.uint8 and arrays.train["x"].shape == (3, 3, 4, 4)
    # in the order of names
    assert arrays.train["x"][:, 0, 0, 0].tolist() == [1, 2, 3] and arrays.train["y"].tolist() == [0, 0, 1]
    assert arrays.test["x"][:, :, 1, 2].tolist() == [[4, 0, 7]] and arrays.test["y"].tolist() == [1]
    assert data.prepare == Images(255.0, (0.5,) * 3, (0.25,) * 3)
    assert Folder.not_in_result == ()


def test_gray_images(flowers):
    save(flowers / "train" / "rose", "b.png", 9, "L")
    data = Folder(root=str(flowers), channels=1)
    # 0.299 red + 0.587 green + 0.114 blue
    assert data.arrays().train["x"][:, 0, 0, 0].tolist() == [1, 9, 2] and data.shape == (1, 4, 4)


def test_images_of_several_sizes_are_resized_and_cut_in_the_middle(flowers):
    wide = np.zeros((6, 12, 3), np.uint8)
    wide[:, 2:10] = 200  # the square in the middle, and the two columns beside it that resizing takes in
    Image.fromarray(wide).save(flowers / "train" / "rose" / "b.png")
    assert message(Folder(root=str(flowers)).arrays) == (
        f"{BROKEN.format(1)}\n  {flowers}/train/rose/b.png: it has 6 x 12 pixels, not 4 x 4"
    )
    data = Folder(root=str(flowers), size=3)
    assert (data.shape, data.seen, data.prepare.size) == ((3, 3, 3), (3, 3, 3), None)
    x = data.arrays().train["x"]
    assert x.shape == (3, 3, 3, 3) and (x[1] == 200).all()


def test_transparent_parts_are_white(flowers):
    """Black marks that are in the alpha channel only; a palette with a transparent colour."""
    rose = flowers / "train" / "rose"
    pixels = np.zeros((4, 4, 4), np.uint8)
    pixels[1, :, 3] = 255
    Image.fromarray(pixels).save(rose / "b.png")
    Image.new("P", (4, 4), 0).save(rose / "c.png", transparency=0)
    x = Folder(root=str(flowers)).arrays().train["x"]
    assert (x[1, :, 1] == 0).all() and (x[1, :, [0, 2, 3]] == 255).all() and (x[2] == 255).all()


def test_images_are_turned_as_their_exif_data_say(flowers):
    """Phones store upright photos on their side; a note says 6: turn clockwise."""
    bar = np.zeros((4, 2, 3), np.uint8)
    bar[:, 0] = 255
    for file in (flowers / "train" / "rose" / "a.PNG", flowers / "train" / "rose" / "b.png"):
        image = Image.fromarray(bar.transpose(1, 0, 2)[:, ::-1])
        image.getexif()[0x0112] = 6
        image.save(file, exif=image.getexif())
    for file in [*flowers.glob("*/tulip/*")]:
        Image.fromarray(bar).save(file)
    data = Folder(root=str(flowers))
    x = data.arrays().train["x"]
    assert data.shape == (3, 4, 2)
    assert x[0, 0].tolist() in ([[255, 0]] * 4, [[0, 255]] * 4) and (x[0] == x[1]).all()


def test_other_files_are_noted_and_images_with_several_frames_refused(flowers):
    rose = flowers / "train" / "rose"
    Image.new("L", (4, 4), 5).save(rose / "d.gif")
    (rose / "e.heic").touch()
    (rose / "more").mkdir()
    arrays = Folder(root=str(flowers)).arrays()
    assert arrays.train["x"][:, 0, 0, 0].tolist() == [1, 2, 5, 3]
    assert arrays.notes == (
        f"data.root: in the class folders of {flowers}/train, these are left out, because they are no images: 1 .heic, "
        "1 .txt, 1 folders",
    )
    frames = [Image.new("L", (4, 4), i) for i in range(3)]
    frames[0].save(rose / "d.gif", save_all=True, append_images=frames[1:])
    assert message(Folder(root=str(flowers)).arrays) == f"{BROKEN.format(1)}\n  {rose}/d.gif: it has 3 frames, not one"


def test_without_train_and_test_a_part_is_held_out(tmp_path):
    for i in range(10):
        save(tmp_path / "cat", f"{i}.png", (i, 0, 0))
        save(tmp_path / "dog", f"{i}.png", (10 + i, 0, 0))
    data = Folder(root=str(tmp_path), test_fraction=0.3)
    arrays, again = data.arrays(), data.arrays()
    assert np.bincount(arrays.train["y"]).tolist() == [7, 7] and np.bincount(arrays.test["y"]).tolist() == [3, 3]
    red = [split["x"][:, 0, 0, 0] for split in (arrays.train, arrays.test)]
    assert sorted(np.concatenate(red).tolist()) == list(range(20))
    assert np.array_equal(red[0] // 10, arrays.train["y"]) and np.array_equal(red[1] // 10, arrays.test["y"])
    assert np.array_equal(arrays.test["x"], again.test["x"])


def test_broken_images_are_named(flowers):
    rose = flowers / "train" / "rose"
    noise = np.random.default_rng(0).integers(256, size=(64, 64, 3), dtype=np.uint8)
    Image.fromarray(noise).save(rose / "b.png")
    (rose / "b.png").write_bytes((rose / "b.png").read_bytes()[:5000])
    (rose / "c.png").write_text("no image")
    Image.fromarray(np.full((4, 4), 40_000, np.uint16)).save(rose / "deep.png")
    lines = message(Folder(root=str(flowers)).arrays).splitlines()
    assert lines[0] == BROKEN.format(3)
    assert lines[1].startswith(f"  {rose}/b.png: ") and "truncated" in lines[1]
    assert lines[2:] == [
        f"  {rose}/c.png: cannot identify image file '{rose}/c.png'",
        f"  {rose}/deep.png: it has more than 8 bits per channel",
    ]


def test_of_many_broken_images_five_are_named(flowers):
    for i in range(9):
        (flowers / "train" / "rose" / f"x{i}.png").touch()
    lines = message(Folder(root=str(flowers)).arrays).splitlines()
    assert len(lines) == 7 and lines[-1] == "  and 4 more"


def test_a_broken_first_image_is_named_where_it_says_the_shape(flowers):
    (flowers / "train" / "rose" / "a.PNG").write_text("no image")
    assert message(lambda: Folder(root=str(flowers)).shape).startswith(f"{BROKEN.format(1)}\n")
    assert Folder(root=str(flowers), size=5).shape == (3, 5, 5)


def test_folders_that_do_not_fit(flowers, tmp_path_factory):
    empty = tmp_path_factory.mktemp("empty")

    def refused():
        return message(Folder(root=str(flowers)).arrays)

    assert message(Folder(root="/nowhere").arrays) == (
        "data.root: the folder '/nowhere' does not exist. Allowed: an existing folder"
    )
    assert message(Folder(root=str(empty)).arrays) == (
        f"data.root: {empty} has no folders. Allowed: one folder per class"
    )
    (flowers / "test" / "lily").mkdir()
    assert refused() == (f"data.root: {flowers}/test has the class 'lily'. Allowed: the classes of train/: rose, tulip")
    (flowers / "test" / "lily").rename(flowers / "train" / "lily")
    assert refused() == (
        f"data.root: {flowers}/train/lily has no images. Allowed: one or more files that end in .avif, .bmp, .gif, "
        ".j2k, .jfif, .jp2, .jpe, .jpeg, .jpg, .pbm, .pgm, .png, .pnm, .ppm, .tga, .tif, .tiff, .webp"
    )
    (flowers / "train" / "lily").rmdir()
    (flowers / "test").rename(flowers / "validation")
    assert refused() == f"data.root: the folder '{flowers}' has only train/. Allowed: train/ and test/, or neither"


def test_bounds_of_a_folder():
    assert message(read_data, name="folder", root="x", size=10**6) == (
        "exp.yaml: data.size: 1000000 is not valid. Allowed: at most 4096, or null"
    )
    assert message(read_data, name="folder") == "exp.yaml: data.root: a value is required"
