"""The words that registers are made of: what a holding can be made of, be, stand in and look like."""

from __future__ import annotations

MATERIALS = (
    "alabaster", "amber", "ash", "bamboo", "basalt", "birch", "bone", "brass", "bronze", "canvas", "cedar",
    "ceramic", "chalk", "cherry", "clay", "copper", "coral", "cork", "cotton", "crystal", "ebony", "enamel", "felt",
    "flint", "glass", "gold", "granite", "horn", "iron", "ivory", "jade", "jasper", "lacquer", "lead", "leather",
    "limestone", "linen", "maple", "marble", "nickel", "oak", "onyx", "paper", "pearl", "pewter", "pine",
    "porcelain", "quartz", "reed", "rosewood", "sandstone", "satin", "silk", "silver", "slate", "steel", "tin",
    "velvet", "walnut", "wax", "wicker", "willow", "wool", "zinc",
)  # fmt: skip

THINGS = (
    "abacus", "almanac", "anchor", "anvil", "armlet", "astrolabe", "atlas", "banner", "barometer", "basin",
    "basket", "beaker", "bell", "bellows", "bowl", "box", "bracelet", "bridle", "brooch", "bucket", "buckle",
    "button", "cabinet", "candlestick", "cane", "casket", "censer", "chain", "chalice", "chest", "chisel", "clasp",
    "clock", "coin", "comb", "compass", "cradle", "crown", "cup", "dagger", "decanter", "dial", "dish", "drum",
    "easel", "ewer", "fan", "fiddle", "figurine", "flask", "flute", "fork", "frame", "funnel", "globe", "goblet",
    "gong", "hammer", "harp", "helmet", "hinge", "hourglass", "inkwell", "jar", "jug", "kettle", "ladle", "lamp",
    "lantern", "lens", "lever", "lute", "lyre", "mallet", "mask", "medal", "mirror", "mortar", "necklace", "needle",
    "organ", "padlock", "pendant", "pendulum", "pipe", "pitcher", "plaque", "plate", "pulley", "quill", "ring",
    "saddle", "scale", "sceptre", "scroll", "seal", "sextant", "shield", "sickle", "spindle", "spoon", "statue",
    "stool", "sundial", "tablet", "tankard", "telescope", "thimble", "tray", "trumpet", "urn", "vase", "whistle",
    "wreath",
)  # fmt: skip

ROOM_NAMES = (
    "azure", "blue", "broad", "crimson", "domed", "eastern", "green", "grey", "inner", "long", "lower", "narrow",
    "northern", "old", "outer", "painted", "quiet", "red", "round", "southern", "upper", "vaulted", "western",
    "white",
)  # fmt: skip
ROOM_KINDS = ("attic", "cellar", "chamber", "gallery", "hall", "library", "tower", "vault")
ROOMS = tuple(f"{name} {kind}" for name in ROOM_NAMES for kind in ROOM_KINDS)

CONDITIONS = (
    "bent", "blackened", "bleached", "broken", "chipped", "cleaned", "cracked", "crumbling", "dented", "dusty",
    "faded", "flawless", "fragile", "frayed", "mended", "mouldy", "patched", "polished", "repainted", "rusty",
    "scorched", "scratched", "spotless", "stained", "sturdy", "tarnished", "torn", "unfinished", "untouched",
    "warped", "weathered", "worn",
)  # fmt: skip

SHELVES = tuple(str(shelf) for shelf in range(1, 100))
HOOKS = tuple(str(hook) for hook in range(1, 100))
YEARS = tuple(str(year) for year in range(1500, 1900))
