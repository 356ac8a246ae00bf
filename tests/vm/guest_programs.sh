# Runs inside the guest: programs on the nodes of a network alone, over netem, and links changed by hand.
set -e
mount -t tmpfs etc /etc
echo "127.0.0.1 localhost" > /etc/hosts
run=/tmp/net
testbed() { python3 -m testbed "$@"; }
on() { node=$1; shift; testbed exec "$node" --run $run -- "$@"; }
round_trip() { echo "@@rtt $3 $(on "$1" ping -c 3 "$2" | tail -n 1)"; }
# Not by the function: the signal at the end is for the command, not for a shell around it.
python3 -m testbed net clustered --network netem --set network.keep_cpus_awake=false --set network.subnet=10.77.0.0/16 \
    --out $run 2> $run.err &
until grep -q "is up" $run.err 2> /dev/null; do kill -0 $!; sleep 0.2; done
round_trip client-0 a100-0 before
round_trip a100-0 a100-1 before
testbed link set a100-0 a100-1 --rtt "40 ms" --run $run
round_trip a100-0 a100-1 set
testbed link cut a100-0 a100-1 --run $run
! on a100-0 ping -c 1 -W 1 a100-1
testbed link restore a100-0 a100-1 --run $run
round_trip a100-0 a100-1 restored
on a100-0 grep a100-1 /etc/hosts
kill -INT $!
wait $!
