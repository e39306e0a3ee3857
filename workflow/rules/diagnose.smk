"""Step-0 diagnostics of the warm checkpoint: one capture with real engines, then one rule, CSV and figure per study.

snakemake diagnose_toy        everything below for configs/toy.yaml (any experiment: diagnose_NAME)

No training is involved. Figures and tables: results/<experiment>/diagnose-<hash>/<study>.{csv,md,svg,png}.
"""

from quads.diagnostics import STUDIES


def diagnose_targets(name):
    base = paths.diagnose_dir(EXPERIMENTS[name])
    return [base / f"{study}.json" for study in STUDIES]


def arms_hash(wildcards):
    arms = load_arms(experiment_of(wildcards), Path("configs"), more=True)
    return config_hash(*arms)


def parent(name):
    return lambda wildcards, input: Path(input[name]).parent


for name in EXPERIMENTS:

    rule:
        name:
            f"diagnose_{name}"
        input:
            diagnose_targets(name),


rule diagnose_capture:
    input:
        model=model_manifest,
        # The checkpoint already depends on the data's content; here the files only have to be there.
        data=ancient(data_manifest),
    output:
        "results/{experiment}/diagnose-{diagnose}/captures/manifest.json",
    log:
        "results/logs/{experiment}/diagnose-{diagnose}/capture.log",
    benchmark:
        "results/benchmarks/{experiment}/diagnose-{diagnose}/capture.tsv"
    wildcard_constraints:
        diagnose="[0-9a-f]{10}",
    threads: threads_of
    resources:
        mem_mb=memory_mb,
        job_gib=memory_gib,
        cpus_per_task=threads_of,
        gpu=gpus,
        runtime=240,
    params:
        code=code_hash("quads.diagnostics.capture", "quads.integrations.vllm"),
        arms=arms_hash,
        experiment=config_file,
        model=parent("model"),
        data=parent("data"),
        out=folder,
    shell:
        "python -m quads.diagnose capture --experiment {params.experiment} --model {params.model} "
        "--data {params.data} --out {params.out} 2>&1 | tee -a {log}"


for study in STUDIES:

    rule:
        name:
            f"diagnose_{study}_study"
        input:
            captures="results/{experiment}/diagnose-{diagnose}/captures/manifest.json",
            model=ancient(model_manifest),
        output:
            csv=f"results/{{experiment}}/diagnose-{{diagnose}}/{study}.csv",
            markdown=f"results/{{experiment}}/diagnose-{{diagnose}}/{study}.md",
            svg=report(
                f"results/{{experiment}}/diagnose-{{diagnose}}/{study}.svg",
                caption="../report/diagnose.rst",
                category="Diagnostics",
            ),
            png=f"results/{{experiment}}/diagnose-{{diagnose}}/{study}.png",
            done=f"results/{{experiment}}/diagnose-{{diagnose}}/{study}.json",
        log:
            f"results/logs/{{experiment}}/diagnose-{{diagnose}}/{study}.log",
        benchmark:
            f"results/benchmarks/{{experiment}}/diagnose-{{diagnose}}/{study}.tsv"
        wildcard_constraints:
            diagnose="[0-9a-f]{10}",
        threads: threads_of
        resources:
            mem_mb=memory_mb,
            job_gib=memory_gib,
            cpus_per_task=threads_of,
            gpu=gpus,
            runtime=120,
        params:
            code=code_hash("quads.diagnostics.studies", "quads.diagnostics.write"),
            arms=arms_hash,
            experiment=config_file,
            study=study,
            model=parent("model"),
            captures=parent("captures"),
            out=folder,
        shell:
            "python -m quads.diagnose {params.study} --experiment {params.experiment} --model {params.model} "
            "--captures {params.captures} --out {params.out} 2>&1 | tee -a {log}"
