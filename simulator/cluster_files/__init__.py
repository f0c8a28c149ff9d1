"""Files that describe one real cluster: HCCL rank tables, the matrix of ``nvidia-smi topo -m``, InfraGraphs."""

from simulator.cluster_files.described import described_hardware
from simulator.cluster_files.infragraph import infragraph, infragraph_hardware, is_infragraph
from simulator.cluster_files.nvidia_matrix import NvidiaMatrix, is_matrix, matrix_hardware, parse_nvidia_matrix
from simulator.cluster_files.rank_table import RankedDevice, RankTable, is_rank_table, parse_rank_table, read_rank_table
from simulator.cluster_files.rank_table_writing import TableForm, numbered_table, rank_table_text, table_form

__all__ = [
    "NvidiaMatrix",
    "RankTable",
    "RankedDevice",
    "TableForm",
    "described_hardware",
    "infragraph",
    "infragraph_hardware",
    "is_infragraph",
    "is_matrix",
    "is_rank_table",
    "matrix_hardware",
    "numbered_table",
    "parse_nvidia_matrix",
    "parse_rank_table",
    "rank_table_text",
    "read_rank_table",
    "table_form",
]
