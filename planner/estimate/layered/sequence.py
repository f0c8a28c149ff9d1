"""Networks for sound and text other than transformers: Jasper, QuartzNet, GNMT, Tacotron 2, WaveGlow."""

from __future__ import annotations

from planner.estimate.layered.builder import NetworkBuilder
from planner.estimate.training_run import LayeredNetwork
from simulator.program import Kernel

UTTERANCE_FRAMES = 1230
"""Frames of 10 ms of a mean utterance of LibriSpeech."""
LETTERS = 29
SENTENCE_TOKENS = 26
"""Mean pieces of words of a sentence of WMT16 in one language."""
CLIP_FRAMES = 566
CLIP_LONGEST_FRAMES = 860
CLIP_LETTERS = 100
"""Mean mel frames and letters of a clip of LJSpeech, and the longest frames in a batch, to which all are padded."""
SEGMENT_SAMPLES = 8000


def jasper(name: str) -> LayeredNetwork:
    """Jasper 10x5 with dense residuals (arXiv:1904.03288)."""
    net = NetworkBuilder(64, UTTERANCE_FRAMES).unit(256, 11, 2)
    inputs = [256]
    for channels, kernel in ((256, 11), (384, 13), (512, 17), (640, 21), (768, 25)):
        for _ in range(2):
            residuals = list(inputs)
            for _ in range(4):
                net.unit(channels, kernel)
            net.unit(channels, kernel, activation="")
            with net.branch():
                for width in residuals:
                    net.become(width).unit(channels, 1, activation="").add()
            net.relu()
            inputs.append(channels)
    net.unit(896, 29, dilation=2).unit(1024, 1).convolution(LETTERS, 1, bias=True)
    return net.finish(name, "utterance")


def quartznet(name: str) -> LayeredNetwork:
    """QuartzNet 15x5 (arXiv:1910.10261): the same with separable convolutions."""
    net = NetworkBuilder(64, UTTERANCE_FRAMES).convolution(64, 33, 2, groups=64).unit(256, 1)
    for channels, kernel in ((256, 33), (256, 39), (512, 51), (512, 63), (512, 75)):
        for _ in range(3):
            with net.branch():
                net.unit(channels, 1, activation="")
            for index in range(5):
                net.convolution(net.channels, kernel, groups=net.channels)
                net.unit(channels, 1, activation="relu" if index < 4 else "")
            net.add().relu()
    net.convolution(512, 87, groups=512, dilation=2).unit(512, 1).unit(1024, 1).convolution(LETTERS, 1, bias=True)
    return net.finish(name, "utterance")


def gnmt(name: str, hidden: int = 1024, vocabulary: int = 32320) -> LayeredNetwork:
    """GNMT v2 (arXiv:1609.08144): four recurrent layers each way, attention; rates count tokens of both languages."""
    net = NetworkBuilder(1, SENTENCE_TOKENS).embedding(vocabulary, hidden)
    net.recurrent(hidden, bidirectional=True)
    for _ in range(3):
        net.recurrent(hidden)
    net.become(1, SENTENCE_TOKENS).embedding(vocabulary, hidden, trained=False).recurrent(hidden)
    with net.branch():
        net.linear(hidden).attention(1, hidden, SENTENCE_TOKENS)
    for _ in range(3):
        net.become(2 * hidden).concatenate(2 * hidden).recurrent(hidden)
    net.linear(vocabulary)
    net.become(1, SENTENCE_TOKENS * vocabulary)
    net.softmax()
    return net.finish(name, "sentence", units=2 * SENTENCE_TOKENS)


def tacotron2(name: str) -> LayeredNetwork:
    """Tacotron 2 (arXiv:1712.05884): a decoder that takes one mel frame after the other; rates count frames."""
    net = NetworkBuilder(1, CLIP_LETTERS).embedding(148, 512)
    for _ in range(3):
        net.unit(512, 5)
    net.recurrent(256, bidirectional=True)
    net.become(80, CLIP_LONGEST_FRAMES).linear(256, bias=False).relu().linear(256, bias=False).relu()
    net.become(768, CLIP_LONGEST_FRAMES).recurrent(1024)
    net.steps(CLIP_LONGEST_FRAMES, Kernel.COPY, 40, 6 * CLIP_LETTERS * 128)
    net.become(1536, CLIP_LONGEST_FRAMES).recurrent(1024).become(1536).linear(80)
    for channels in (512, 512, 512, 512, 80):
        net.unit(channels, 5, activation="smooth")
    net.add()
    return net.finish(name, "clip", units=CLIP_FRAMES)


def waveglow(name: str) -> LayeredNetwork:
    """WaveGlow (arXiv:1811.00002): twelve coupling steps of eight dilated layers; rates count samples of sound."""
    frames = SEGMENT_SAMPLES // 8
    net = NetworkBuilder(80, SEGMENT_SAMPLES // 256).transposed(80, 1024 // 256 * 256, 256)
    for step in range(12):
        remaining = 8 - 2 * (step // 4)
        net.become(remaining, frames).convolution(remaining, 1)
        net.become(remaining // 2).convolution(512, 1, bias=True)
        for layer in range(8):
            with net.branch():
                net.become(640).convolution(1024, 1, bias=True)
            with net.branch():
                net.convolution(1024, 3, dilation=2**layer, bias=True).add().smooth().smooth()
                net.become(512).scale().convolution(1024 if layer < 7 else 512, 1, bias=True).become(512).add().add()
        net.convolution(remaining, 1, bias=True).become(remaining // 2).scale().add().concatenate(remaining)
    return net.finish(name, "sound", units=SEGMENT_SAMPLES)
