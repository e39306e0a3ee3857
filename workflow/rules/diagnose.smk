"""Step-0 diagnostics of the warm checkpoint: one capture with real engines, then one rule, CSV and figure per study.

snakemake diagnose_toy        everything below for configs/toy.yaml (any experiment: diagnose_NAME)

No training is involved. Figures and tables: results/<experiment>/diagnose-<hash>/<study>.{csv,md,svg,png}.
"""

from quads.diagnostics import STUDIES

ARMS = {
    name: config_hash(*load_arms(experiment, Path("configs"), more=True))
    for name, experiment in EXPERIMENTS.items()
}


for name in EXPERIMENTS:

    rule:
        name:
            f"diagnose_{name}"
        input:
            [
                paths.diagnose_dir(EXPERIMENTS[name]) / f"{study}.json"
                for study in STUDIES
            ],


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
        arms=lambda wildcards: ARMS[wildcards.experiment],
        experiment=config_file,
        model=lambda wildcards, input: Path(input.model).parent,
        data=lambda wildcards, input: Path(input.data).parent,
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
            arms=lambda wildcards: ARMS[wildcards.experiment],
            experiment=config_file,
            study=study,
            model=lambda wildcards, input: Path(input.model).parent,
            captures=lambda wildcards, input: Path(input.captures).parent,
            out=folder,
        shell:
            "python -m quads.diagnose {params.study} --experiment {params.experiment} --model {params.model} "
            "--captures {params.captures} --out {params.out} 2>&1 | tee -a {log}"
