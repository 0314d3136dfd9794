// Command driver plays the peers of a tunnel that are not part of this
// repository: the API server that opens connections through a front end, the
// service behind the agent, a name server, and a certificate authority.
//
// Every subcommand prints its result as one JSON object on the last line of
// standard output, writes diagnostics to standard error, and exits 0 if what it
// checks holds and 1 if it does not.
package main

import (
	"encoding/json"
	"flag"
	"fmt"
	"maps"
	"os"
	"slices"
	"sync"
	"time"
)

// result is the JSON object that a subcommand prints. The keys "ok", "command"
// and, on failure, "error" are added by emit.
type result map[string]any

// command runs one subcommand with its own arguments. It returns what it
// learnt even when it fails.
type command func(args []string) (result, error)

var commands = map[string]command{
	"cancel":        runCancel,
	"certs":         runCerts,
	"dial":          runDial,
	"dials":         runDials,
	"download":      runDownload,
	"echo":          runEcho,
	"half":          runHalf,
	"hold":          runHold,
	"http":          runHTTP,
	"native-agent":  runNativeAgent,
	"native-server": runNativeServer,
	"nxdomain":      runNXDomain,
	"serverfirst":   runServerFirst,
	"service":       runService,
	"upload":        runUpload,
}

func main() {
	if len(os.Args) < 2 || commands[os.Args[1]] == nil {
		fmt.Fprintf(os.Stderr, "usage: driver COMMAND [flags], where COMMAND is one of %q\n",
			slices.Sorted(maps.Keys(commands)))
		os.Exit(1)
	}
	res, err := commands[os.Args[1]](os.Args[2:])
	finish(res, err)
}

// stdout serialises the JSON lines, and done makes the first result the last line.
var (
	stdout sync.Mutex
	done   sync.Once
)

// emit prints one JSON line.
func emit(r result) {
	stdout.Lock()
	defer stdout.Unlock()
	// Encoding cannot fail for the plain values used here; a closed pipe shows as
	// a missing line to the caller.
	_ = json.NewEncoder(os.Stdout).Encode(r)
}

// finish prints the final result and ends the process. Only its first caller
// gets through, so that the watchdog and a late success never both print.
func finish(r result, err error) {
	done.Do(func() {
		if r == nil {
			r = result{}
		}
		r["command"] = os.Args[1]
		r["ok"] = err == nil
		if err != nil {
			r["error"] = err.Error()
		}
		emit(r)
		if err != nil {
			os.Exit(1)
		}
		os.Exit(0)
	})
}

// parse reads flags, refuses stray arguments, and never returns on bad input.
func parse(fs *flag.FlagSet, args []string) error {
	if err := fs.Parse(args); err != nil {
		return err
	}
	if fs.NArg() > 0 {
		return fmt.Errorf("unexpected argument %q", fs.Arg(0))
	}
	return nil
}

// millis is the time since start in milliseconds, as JSON results report it.
func millis(start time.Time) float64 {
	return float64(time.Since(start).Microseconds()) / 1000
}

// percentile returns the p-th percentile (0..100) of sorted durations in
// microseconds, or 0 if there are none.
func percentile(sorted []time.Duration, p int) int64 {
	if len(sorted) == 0 {
		return 0
	}
	return sorted[min(len(sorted)*p/100, len(sorted)-1)].Microseconds()
}
