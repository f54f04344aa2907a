"""Low-rank adapters over a frozen base: one method per file, on `base.py: LowRank`."""

from rayfl.methods.lowrank.base import LowRank
from rayfl.methods.lowrank.fed_plora import FedPLoRA
from rayfl.methods.lowrank.fedex_lora import FedExLoRA
from rayfl.methods.lowrank.fedit import FedIT
from rayfl.methods.lowrank.fedrora import FedRoRA
from rayfl.methods.lowrank.fedsb import FedSB
from rayfl.methods.lowrank.fedsvd import FedSVD
from rayfl.methods.lowrank.ffa_lora import FFALoRA
from rayfl.methods.lowrank.flexlora import FlexLoRA
from rayfl.methods.lowrank.flora import FLoRA
from rayfl.methods.lowrank.florist import FLoRIST
from rayfl.methods.lowrank.hetlora import HetLoRA
from rayfl.methods.lowrank.important_lora import ImportantLoRA
from rayfl.methods.lowrank.lora_a2 import LoRAA2
from rayfl.methods.lowrank.lora_fair import LoRAFAIR
from rayfl.methods.lowrank.raflora import RaFLoRA
from rayfl.methods.lowrank.rbla import RBLA
from rayfl.methods.lowrank.rolling_lora import RollingLoRA
from rayfl.methods.lowrank.rolora import RoLoRA
from rayfl.methods.lowrank.zero_padding import ZeroPadding

LOWRANK: dict[str, type[LowRank]] = {
    "fedit": FedIT,
    "zero_padding": ZeroPadding,
    "rbla": RBLA,
    "hetlora": HetLoRA,
    "ffa_lora": FFALoRA,
    "rolora": RoLoRA,
    "lora_a2": LoRAA2,
    "fed_plora": FedPLoRA,
    "rolling_lora": RollingLoRA,
    "important_lora": ImportantLoRA,
    "fedsvd": FedSVD,
    "fedsb": FedSB,
    "lora_fair": LoRAFAIR,
    "fedex_lora": FedExLoRA,
    "flora": FLoRA,
    "florist": FLoRIST,
    "flexlora": FlexLoRA,
    "raflora": RaFLoRA,
    "fedrora": FedRoRA,
}
