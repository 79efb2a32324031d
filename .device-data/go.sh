export PYTHONPATH=src HOCKET_DATA=$PWD/.device-data PYTHONUNBUFFERED=1
export OMPI_ALLOW_RUN_AS_ROOT=1 OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1
nproc; python3 -c "import torch,sys; print(torch.__version__, sys.version)"; which mpiexec; pip list 2>/dev/null | grep -iE "typer|rich|safetensors|scikit|mpi4py|click|pytest|hypothesis"
for e in threads sim torch mpi; do for n in 1 2; do echo "== cuda $e $n"; timeout 90 python3 -m hocket train mnist-mlp --device cuda --engine $e -n $n --strategy allreduce --epochs 1 --batch 512 --out /tmp/o-$e-$n 2>&1 | grep -vE "Warning|warn" | head -14; done; done
echo "== local-sgd cuda"; timeout 90 python3 -m hocket train mnist-cnn --device cuda --engine mpi -n 2 --strategy local-sgd:every=4,momentum=average --momentum 0.5 --epochs 1 --out /tmp/o-l 2>&1 | head -14
echo "== scaling"; cd bench; PYTHONPATH=../src timeout 280 python3 scaling.py 1 2 4 8 16
