"""Knowledge of the demonstration model: a table of devices, a table of units, and people's names and places."""

from __future__ import annotations

from dataclasses import dataclass

SCALE = {"KiB": 1, "MiB": 1024, "GiB": 1024 * 1024}


@dataclass(frozen=True)
class Device:
    """One device. `memory` is the largest variant sold; `variants` says that smaller ones exist."""

    name: str
    kind: str
    cores: int
    processor: str
    memory: str
    year: int
    variants: bool = False

    @property
    def kib(self) -> int:
        """Memory in KiB."""
        number, unit = self.memory.split()
        return int(number) * SCALE[unit]

    @property
    def joins(self) -> bool:
        """True if it can run a worker: a worker needs an operating system and a 64-bit processor."""
        return self.processor in (ARM, X86)


ARM, X86 = "64-bit Arm", "64-bit x86"
BOARD, MICRO, PHONE, LAPTOP = "single-board computer", "microcontroller board", "phone", "laptop"

DEVICES = (
    Device("Raspberry Pi Zero 2 W", BOARD, 4, ARM, "512 MiB", 2021),
    Device("Raspberry Pi 3", BOARD, 4, ARM, "1 GiB", 2016),
    Device("Raspberry Pi 4", BOARD, 4, ARM, "8 GiB", 2019, True),
    Device("Raspberry Pi 5", BOARD, 4, ARM, "16 GiB", 2023, True),
    Device("Raspberry Pi 400", "keyboard computer", 4, ARM, "4 GiB", 2020),
    Device("Raspberry Pi Pico", MICRO, 2, "32-bit Arm", "264 KiB", 2021),
    Device("Jetson Nano", BOARD, 4, ARM, "4 GiB", 2019, True),
    Device("Jetson Xavier NX", BOARD, 6, ARM, "16 GiB", 2020, True),
    Device("Jetson Orin Nano", BOARD, 6, ARM, "8 GiB", 2023, True),
    Device("Jetson AGX Orin", BOARD, 12, ARM, "64 GiB", 2022, True),
    Device("Orange Pi 5", BOARD, 8, ARM, "32 GiB", 2022, True),
    Device("ODROID-C4", BOARD, 4, ARM, "4 GiB", 2020),
    Device("ODROID-N2", BOARD, 6, ARM, "4 GiB", 2019, True),
    Device("BeagleBone Black", BOARD, 1, "32-bit Arm", "512 MiB", 2013),
    Device("Arduino Uno", MICRO, 1, "8-bit AVR", "2 KiB", 2010),
    Device("micro:bit V2", MICRO, 1, "32-bit Arm", "128 KiB", 2020),
    Device("ESP32", MICRO, 2, "32-bit Xtensa", "520 KiB", 2016),
    Device("Pixel 6", PHONE, 8, ARM, "8 GiB", 2021),
    Device("Pixel 8", PHONE, 9, ARM, "8 GiB", 2023),
    Device("Galaxy S21", PHONE, 8, ARM, "8 GiB", 2021),
    Device("Fairphone 5", PHONE, 8, ARM, "8 GiB", 2023, True),
    Device("Steam Deck", "handheld computer", 4, X86, "16 GiB", 2022),
    Device("MacBook Air M1", LAPTOP, 8, ARM, "16 GiB", 2020, True),
    Device("MacBook Air M2", LAPTOP, 8, ARM, "24 GiB", 2022, True),
    Device("Pinebook Pro", LAPTOP, 6, ARM, "4 GiB", 2019),
    Device("Surface Go", "tablet", 2, X86, "8 GiB", 2018, True),
)

# Kinds of device that people ask about without naming a model, and whether such a device can join.
CATEGORIES_THAT_JOIN = ("laptop", "desktop computer", "server", "mini PC", "single-board computer", "Android phone")
CATEGORIES_THAT_DO_NOT = ("printer", "doorbell", "kettle", "microcontroller", "light bulb", "calculator")

# (large unit, its plural, small unit, how many small ones make a large one, the largest number asked about)
UNITS = (
    ("minute", "minutes", "seconds", 60, 12),
    ("hour", "hours", "minutes", 60, 12),
    ("day", "days", "hours", 24, 10),
    ("week", "weeks", "days", 7, 12),
    ("year", "years", "months", 12, 12),
    ("centimetre", "centimetres", "millimetres", 10, 20),
    ("metre", "metres", "centimetres", 100, 20),
    ("kilometre", "kilometres", "metres", 1000, 20),
    ("kilogram", "kilograms", "grams", 1000, 20),
    ("litre", "litres", "millilitres", 1000, 20),
    ("byte", "bytes", "bits", 8, 16),
    ("KiB", "KiB", "bytes", 1024, 8),
    ("MiB", "MiB", "KiB", 1024, 8),
    ("GiB", "GiB", "MiB", 1024, 8),
    ("TiB", "TiB", "GiB", 1024, 8),
)

NAMES = tuple(
    "Ada Alan Amina Anna Aron Bea Ben Carla Chen Clara Daniel Dora Edith Elif Emil Emma Eva Farah Felix Finn Grace "
    "Greta Hana Hugo Ida Igor Ines Ivan Jana John Jonas Julia Kai Karim Kofi Lea Lena Leo Li Lina Linus Luca Lucy "
    "Maria Marie Mark Max Maya Mei Mia Mila Nadia Nina Noah Nora Olga Omar Oscar Paul Peter Priya Ravi Rosa Ruth Sam "
    "Sara Sofia Sven Tara Theo Tim Tom Uma Vera Victor Wei Yara Yuki Zoe".split()
)
CITIES = tuple(
    "Accra Amman Athens Berlin Bern Bogota Boston Cairo Delhi Dublin Geneva Hanoi Helsinki Kyiv Lagos Leeds Lima "
    "Lisbon London Lyon Madrid Milan Munich Nairobi Osaka Oslo Paris Porto Prague Quito Riga Rome Seoul Sofia Sydney "
    "Tallinn Tokyo Toronto Tunis Turin Vienna Vilnius Warsaw Zagreb Zurich".split()
)
COLOURS = tuple("black blue brown gold green grey orange pink purple red silver white yellow".split())
THINGS = tuple("phone laptop desktop server tablet board workstation".split())
AMOUNTS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64)

SUBJECTS = tuple(
    "the weather|politics|football|the news|music|history|love|the moon|cooking|chess|films|cats|dogs|gardening|"
    "philosophy|religion|the stock market|physics|chemistry|biology|painting|fashion|travel|space|dinosaurs|pirates|"
    "the sea|the economy|medicine|law|poetry|novels|cars|trains|birds|mountains|tea|coffee|bread|pizza|dreams|ghosts|"
    "robots|the future|the stars|winter|summer|elections|wine|tennis|the theatre|photography|mathematics|geography|"
    "trees|flowers|holidays|money|friendship|happiness".split("|")
)
