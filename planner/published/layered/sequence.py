"""Networks for sound and text other than transformers: Jasper, QuartzNet, GNMT, Tacotron 2, WaveGlow."""

from __future__ import annotations

from functools import lru_cache

import numpy as np

from planner.cost.training_run import LayeredNetwork
from planner.published.layered.builder import NetworkBuilder
from simulator.program import Kernel

UTTERANCE_FRAMES = 1632
"""Frames of 10 ms to which batches of LibriSpeech's utterances are padded: the longest of those below 16.7 s
(``--pad_to_max`` of ``Jasper/scripts/train_benchmark.sh`` of NVIDIA's examples)."""
LONGEST_S, SPEEDS, ALIGNED_FRAMES = 16.7, (0.85, 1.15), 16
"""QuartzNet's batches are drawn at random from the utterances up to so many seconds, each stretched by a factor drawn
evenly between these, and padded to the longest of the batch in multiples of so many frames
(``configs/quartznet15x5_speedp-online-1.15_speca.yaml`` and ``common/dali`` of NVIDIA's examples)."""
USUAL_BATCH = (72, 8)
"""Utterances a device, and devices, of ``QuartzNet/scripts/train.sh``."""
SHARES = (0.0, 0.05, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 0.95, 0.99, 1.0)
SECONDS = (1.9, 4.2, 6.5, 10.1, 12.7, 13.5, 14.1, 14.8, 15.0, 15.3, 15.8, 15.95, 16.65, 17.0)
"""Shares of the utterances of LibriSpeech's train-clean-100 that are as short: what stretched by 1/0.9, 1 and 1/1.1 has
the percentiles of ``egs/librispeech/ASR/local/display_manifest_statistics.py`` of github.com/k2-fsa/icefall."""
LETTERS = 29
SENTENCE_TOKENS = 24.4
PADDED_TOKENS = 32
"""Mean pieces of words of a sentence of WMT16 in one language, and those of a batch: sentences go into buckets 10 wide
by the longer of both languages and are padded to the longest of the batch (``GNMT/seq2seq/data/sampler.py``). A pass of
142 batches of 1,024 pairs has 48.8 pieces a pair, its buckets a mean width of 32 by the times of their batches
(``pytorch/results/A100_80GB_SXM4_v1/PyTorch_gnmt_FP32`` of github.com/lambdal/deeplearning-benchmark)."""
CLIP_FRAMES = 566
CLIP_LONGEST_FRAMES = 860
CLIP_LETTERS = 180
"""Mean mel frames of a clip of LJSpeech, and the most frames and letters in a batch, to which all are padded."""
SEGMENT_SAMPLES = 8000


def jasper(name: str) -> LayeredNetwork:
    """Jasper 10x5 with dense residuals (arXiv:1904.03288), masks before convolutions, and dropout."""
    net = NetworkBuilder(64, UTTERANCE_FRAMES)
    _masked(net, 256, 11, 2).relu().dropout()
    inputs = [256]
    for channels, kernel in ((256, 11), (384, 13), (512, 17), (640, 21), (768, 25)):
        for _ in range(2):
            residuals = list(inputs)
            for _ in range(4):
                _masked(net, channels, kernel).relu().dropout()
            _masked(net, channels, kernel)
            with net.branch():
                for width in residuals:
                    _masked(net.become(width), channels, 1).add()
            net.relu().dropout()
            inputs.append(channels)
    _masked(net, 896, 29, dilation=2).relu().dropout()
    _masked(net, 1024, 1).relu().dropout().convolution(LETTERS, 1, bias=True)
    return net.finish(name, "utterance")


@lru_cache(maxsize=256)
def padded_frames(utterances: int, devices: int = 1) -> int:
    """Frames to which random batches of so many utterances a device are padded, where every step waits for the slowest.

    Devices wait for each other where the loss is summed, between the passes of a batch: it is the expectation of the
    longest, over the devices, of the forward pass of one batch and the backward pass of the one before, twice as long.
    """
    seconds = np.interp(np.linspace(0, 1, 2001), SHARES, SECONDS)
    seconds = seconds[seconds <= LONGEST_S]
    blocks = np.arange(int(LONGEST_S * SPEEDS[1] * 100 / ALIGNED_FRAMES) + 2)
    reached = blocks[:, None] * ALIGNED_FRAMES / 100 / seconds
    shorter = np.clip((reached - SPEEDS[0]) / (SPEEDS[1] - SPEEDS[0]), 0, 1).mean(axis=1)
    longest = np.diff(shorter**utterances, prepend=0.0)
    twice = np.zeros(2 * len(longest) - 1)
    twice[::2] = longest
    slowest = np.cumsum(np.convolve(twice, longest)) ** devices
    return round(ALIGNED_FRAMES / 3 * float((1 - slowest).sum()))


def quartznet(name: str, frames: int) -> LayeredNetwork:
    """QuartzNet 15x5 (arXiv:1910.10261): the same with separable convolutions, and without dropout."""
    net = NetworkBuilder(64, frames).copy().convolution(64, 33, 2, groups=64)
    _masked(net, 256, 1).relu()
    for channels, kernel in ((256, 33), (256, 39), (512, 51), (512, 63), (512, 75)):
        for _ in range(3):
            with net.branch():
                _masked(net, channels, 1)
            for index in range(5):
                net.copy().convolution(net.channels, kernel, groups=net.channels)
                _masked(net, channels, 1)
                if index < 4:
                    net.relu()
            net.add().relu()
    net.copy().convolution(512, 87, groups=512, dilation=2)
    _masked(net, 512, 1).relu()
    _masked(net, 1024, 1).relu().convolution(LETTERS, 1, bias=True)
    return net.finish(name, "utterance")


def _masked(net: NetworkBuilder, channels: int, kernel: int, stride: int = 1, *, dilation: int = 1) -> NetworkBuilder:
    """What lies behind the end of an utterance is zeroed in a copy before each convolution; batch norm follows."""
    return net.copy().unit(channels, kernel, stride, dilation=dilation, activation="")


def gnmt(name: str, hidden: int = 1024, vocabulary: int = 32320) -> LayeredNetwork:
    """GNMT v2 (arXiv:1609.08144): four recurrent layers each way, attention; rates count tokens of both languages.

    The scores of attention are those of Bahdanau (arXiv:1409.0473), of all pairs of positions and units at once; the
    loss has smoothed labels, in float32.
    """
    net = NetworkBuilder(1, PADDED_TOKENS).embedding(vocabulary, hidden)
    net.recurrent(hidden, bidirectional=True)
    for _ in range(3):
        net.recurrent(hidden)
    net.become(1, PADDED_TOKENS).embedding(vocabulary, hidden, trained=False).recurrent(hidden)
    with net.branch():
        net.linear(hidden).attention(1, hidden, PADDED_TOKENS)
        net.become(hidden, PADDED_TOKENS, PADDED_TOKENS).scale().smooth()
        net.become(hidden, PADDED_TOKENS)
    for _ in range(3):
        net.become(2 * hidden).concatenate(2 * hidden).recurrent(hidden)
    net.linear(vocabulary)
    net.become(1, PADDED_TOKENS * vocabulary)
    return net.smoothed_loss().finish(name, "sentence", units=2 * SENTENCE_TOKENS)


def tacotron2(name: str) -> LayeredNetwork:
    """Tacotron 2 (arXiv:1712.05884): a decoder that takes one mel frame after the other; rates count frames."""
    net = NetworkBuilder(1, CLIP_LETTERS).embedding(148, 512)
    for _ in range(3):
        net.unit(512, 5)
    net.recurrent(256, bidirectional=True)
    net.become(80, CLIP_LONGEST_FRAMES).linear(256, bias=False).relu().linear(256, bias=False).relu()
    net.sliced(CLIP_LONGEST_FRAMES)
    net.become(768, CLIP_LONGEST_FRAMES).cell(1024)
    # The weighted sum of what was read (a pass) and the energies of attention (9), their gradients, which add up from
    # frame to frame (5 and 11), and what is read for them: half of it each way.
    net.steps(CLIP_LONGEST_FRAMES, Kernel.COPY, 40, CLIP_LETTERS * (3 * 512 + 12 * 128))
    net.become(1536, CLIP_LONGEST_FRAMES).cell(1024).become(1536).linear(80)
    net.accumulate(CLIP_LONGEST_FRAMES, 4 * 1024 * (768 + 1536 + 2 * 1024))
    for channels in (512, 512, 512, 512, 80):
        net.unit(channels, 5, activation="smooth")
    return net.add().finish(name, "clip", units=CLIP_FRAMES)


def waveglow(name: str) -> LayeredNetwork:
    """WaveGlow (arXiv:1811.00002): twelve coupling steps of eight dilated layers; rates count samples of sound.

    The spectrogram lies transposed, so that each layer takes a copy of its own.
    """
    frames = SEGMENT_SAMPLES // 8
    net = NetworkBuilder(80, SEGMENT_SAMPLES // 256).transposed(80, 1024 // 256 * 256, 256)
    for step in range(12):
        remaining = 8 - 2 * (step // 4)
        net.become(remaining, frames).convolution(remaining, 1)
        net.become(remaining // 2).convolution(512, 1, bias=True)
        for layer in range(8):
            with net.branch():
                net.become(640).copy().convolution(1024, 1, bias=True)
            with net.branch():
                net.convolution(1024, 3, dilation=2**layer, bias=True).add().smooth().smooth()
                net.become(512).scale()
                if layer < 7:
                    net.convolution(1024, 1, bias=True).halves()
                else:
                    net.convolution(512, 1, bias=True)
                net.become(512).add().add()
        net.convolution(remaining, 1, bias=True).become(remaining // 2).scale().add().concatenate(remaining)
    return net.normalized_weights().finish(name, "sound", units=SEGMENT_SAMPLES)
