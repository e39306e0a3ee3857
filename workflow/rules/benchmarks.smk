"""Pinned data sets: fetched once with network, then decontaminated without it.

snakemake fetch_data                        every test and training set (about 9 GB with LiveCodeBench and DeepMath)
snakemake fetch_benchmarks                  test sets only
snakemake fetch_data --config local=PATH    from copies of the hub's files, one folder per set
snakemake decontaminate_data                training sets without what overlaps with test sets, and the reports

A set is fetched again when its pin changes, not when a grader does: that is why `code` is not that of the whole stage.
"""

from quads.data.benchmarks import load_spec, names

TEST_SETS = names("test")
# The set that is LiveCodeBench itself stays out; it can be asked for by its path.
TRAINING_SETS = [
    name for name in names("train") if not load_spec(name).is_livecodebench
]


localrules:
    fetch_set,
    fetch_data,
    fetch_benchmarks,
    decontaminate_data,


rule fetch_benchmarks:
    input:
        expand("results/data/{dataset}/manifest.json", dataset=TEST_SETS),


rule fetch_data:
    input:
        rules.fetch_benchmarks.input,
        expand("results/data/{dataset}/manifest.json", dataset=TRAINING_SETS),


rule decontaminate_data:
    input:
        expand(
            "results/data/decontaminated/{dataset}/report.json", dataset=TRAINING_SETS
        ),


rule fetch_set:
    output:
        "results/data/{dataset}/manifest.json",
    log:
        "results/logs/data/{dataset}.log",
    wildcard_constraints:
        dataset="|".join(names()),
    params:
        code=code_hash("quads.data.benchmarks"),
        pin=lambda wildcards: load_spec(wildcards.dataset).pin_hash,
        local=local_copy,
    shell:
        "python -m quads.fetch --set {wildcards.dataset} --out results/data {params.local} 2>&1 | tee -a {log}"


rule decontaminate:
    input:
        own="results/data/{dataset}/manifest.json",
        tests=expand("results/data/{test}/manifest.json", test=TEST_SETS),
    output:
        "results/data/decontaminated/{dataset}/report.json",
    log:
        "results/logs/data/decontaminate-{dataset}.log",
    benchmark:
        "results/benchmarks/data/decontaminate-{dataset}.tsv"
    wildcard_constraints:
        dataset="|".join(names("train")),
    resources:
        mem_mb=8192,
        job_gib=8,
        runtime=60,
        slurm_partition=SITE.partition(gpu=False),
        slurm_account=SITE.account or "",
    params:
        code=code_hash("quads.decontaminate"),
        out=folder,
    shell:
        "python -m quads.decontaminate --set {wildcards.dataset} --data results/data --out {params.out} 2>&1 | tee -a {log}"
