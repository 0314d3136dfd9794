package main

import (
	"bufio"
	"context"
	"errors"
	"flag"
	"fmt"
	"io"
	"net"
	"os"
	"slices"
	"sync"
	"time"
)

func runDial(args []string) (result, error) {
	_, conn, r, err := open(flag.NewFlagSet("dial", flag.ContinueOnError), args)
	if err != nil {
		return r, errors.Unwrap(err) // exactly the text that the front end's client got
	}
	timedClose(r, conn)
	return r, nil
}

// runCancel gives up a dial after a while; it fails if the dial came first.
func runCancel(args []string) (result, error) {
	fs := flag.NewFlagSet("cancel", flag.ContinueOnError)
	after := fs.Duration("after", 100*time.Millisecond, "when to cancel the dial")
	f, err := newFrontEnd(fs, args)
	if err != nil {
		return nil, err
	}
	ctx, cancel := context.WithTimeout(context.Background(), *after)
	defer cancel()
	r := result{"front": f.kind}
	start := time.Now()
	conn, err := f.dial(ctx)
	r["dial_ms"] = millis(start)
	if err == nil {
		timedClose(r, conn)
		return r, errors.New("the dial succeeded before it was cancelled")
	}
	describe(r, err)
	r["dial_error"] = err.Error()
	if ctx.Err() == nil {
		return r, errors.New("the dial failed before it was cancelled")
	}
	return r, nil
}

// runHold keeps one connection open and echoes line by line until either side
// closes. Every step is a JSON line with the key "event".
func runHold(args []string) (result, error) {
	_, conn, r, err := open(flag.NewFlagSet("hold", flag.ContinueOnError), args)
	if err != nil {
		return r, err
	}
	if _, err := io.WriteString(conn, "echo\n"); err != nil {
		return r, err
	}
	start := time.Now()
	emit(result{"event": "open"})
	ended := make(chan error, 1)
	go func() {
		in := bufio.NewReader(conn)
		for {
			line, err := in.ReadString('\n')
			if err != nil {
				ended <- err
				return
			}
			emit(result{"event": "echo", "line": line[:len(line)-1], "ms": millis(start)})
		}
	}()
	typed := make(chan error, 1)
	go func() { _, err := io.Copy(conn, os.Stdin); typed <- err }()
	for {
		select {
		case err := <-ended:
			r["event"], r["how"], r["ms"] = "closed", "eof", millis(start)
			if !errors.Is(err, io.EOF) {
				r["how"], r["read_error"] = "error", err.Error()
			}
			timedClose(r, conn)
			return r, nil
		case err := <-typed:
			if err != nil {
				r["write_error"] = err.Error()
				typed = nil // the reader tells how the connection ended
				continue
			}
			r["event"], r["how"], r["ms"] = "closed", "self", millis(start)
			timedClose(r, conn)
			return r, nil
		}
	}
}

// runEcho measures the latency of round trips on concurrent connections.
func runEcho(args []string) (result, error) {
	fs := flag.NewFlagSet("echo", flag.ContinueOnError)
	connections := fs.Int("connections", 1, "connections at the same time")
	rounds := fs.Int("rounds", 100, "round trips per connection")
	size := fs.Int("size", 64, "bytes per round trip")
	f, err := newFrontEnd(fs, args)
	if err != nil {
		return nil, err
	}
	out := make([]byte, *size)
	for i := range out {
		out[i] = pattern[i%period]
	}
	r := many(f, *connections, *connections, *rounds, func(conn net.Conn, sample func(time.Duration)) error {
		if _, err := io.WriteString(conn, "echo\n"); err != nil {
			return err
		}
		in := make([]byte, len(out))
		for range *rounds {
			start := time.Now()
			if err := roundTrip(conn, out, in); err != nil {
				return err
			}
			sample(time.Since(start))
		}
		return nil
	})
	r["bytes"] = int64(*connections) * int64(*rounds) * int64(*size)
	return r, failures(r)
}

// runDials opens, uses for one byte, and closes connections as fast as it can.
func runDials(args []string) (result, error) {
	fs := flag.NewFlagSet("dials", flag.ContinueOnError)
	count := fs.Int("count", 100, "dials in all")
	concurrency := fs.Int("concurrency", 1, "dials at the same time")
	f, err := newFrontEnd(fs, args)
	if err != nil {
		return nil, err
	}
	r := many(f, *count, *concurrency, 1, func(conn net.Conn, sample func(time.Duration)) error {
		start := time.Now()
		if _, err := io.WriteString(conn, "echo\n"); err != nil {
			return err
		}
		err := roundTrip(conn, []byte("x"), make([]byte, 1))
		sample(time.Since(start))
		return err
	})
	return r, failures(r)
}

// runServerFirst expects a banner, or with -ends an end, without having sent
// anything.
func runServerFirst(args []string) (result, error) {
	fs := flag.NewFlagSet("serverfirst", flag.ContinueOnError)
	banner := fs.String("banner", firstBanner, "bytes that the service sends at once")
	ends := fs.Bool("ends", false, "the service sends nothing and closes at once")
	count := fs.Int("count", 1, "connections in all")
	concurrency := fs.Int("concurrency", 1, "connections at the same time")
	// The client library can lose the close of a connection that ends at once, and
	// then its reader would wait for ever.
	wait := fs.Duration("wait", 2*time.Second, "limit of waiting for one banner")
	f, err := newFrontEnd(fs, args)
	if err != nil {
		return nil, err
	}
	r := many(f, *count, *concurrency, 1, func(conn net.Conn, sample func(time.Duration)) error {
		start := time.Now()
		got := make([]byte, len(*banner))
		late := time.AfterFunc(*wait, func() { abort(conn) })
		n, err := io.ReadFull(conn, got)
		if !late.Stop() {
			return fmt.Errorf("no banner or end within %v", *wait)
		}
		sample(time.Since(start))
		if *ends {
			if err != io.EOF {
				return fmt.Errorf("%d bytes instead of an end: %v", n, err)
			}
			return nil
		}
		if err != nil || string(got) != *banner {
			return fmt.Errorf("banner is %q: %v", got[:n], err)
		}
		return nil
	})
	return r, failures(r)
}

// tally collects what many workers measure.
type tally struct {
	sync.Mutex
	dials, samples, closes []time.Duration
	errors                 map[string]int
	failed                 int
}

func (t *tally) add(list *[]time.Duration, d time.Duration) {
	t.Lock()
	defer t.Unlock()
	*list = append(*list, d)
}

func (t *tally) fail(err error) {
	t.Lock()
	defer t.Unlock()
	t.failed++
	// Texts can hold addresses that differ each time; the first few are enough.
	if len(t.errors) < 16 || t.errors[err.Error()] > 0 {
		t.errors[err.Error()]++
	}
}

// many opens count connections, concurrency at a time, and runs use on each;
// per is how many samples one use takes.
func many(f *frontEnd, count, concurrency, per int, use func(net.Conn, func(time.Duration)) error) result {
	t := &tally{errors: map[string]int{}, samples: make([]time.Duration, 0, count*per)}
	one := func() {
		start := time.Now()
		conn, err := f.dial(context.Background())
		if err != nil {
			t.fail(fmt.Errorf("dial: %w", err))
			return
		}
		t.add(&t.dials, time.Since(start))
		if err := use(conn, func(d time.Duration) { t.add(&t.samples, d) }); err != nil {
			t.fail(err)
		}
		closing := time.Now()
		conn.Close()
		t.add(&t.closes, time.Since(closing))
	}
	start := time.Now()
	work := make(chan struct{})
	var workers sync.WaitGroup
	for range max(concurrency, 1) {
		workers.Go(func() {
			for range work {
				one()
			}
		})
	}
	for range count {
		work <- struct{}{}
	}
	close(work)
	workers.Wait()
	took := time.Since(start)
	r := result{"front": f.kind, "count": count, "failed": t.failed, "elapsed_ms": float64(took.Microseconds()) / 1000,
		"per_s": float64(count) / took.Seconds()}
	if t.failed > 0 {
		r["errors"] = t.errors
	}
	for name, list := range map[string][]time.Duration{"dial_": t.dials, "": t.samples, "close_": t.closes} {
		slices.Sort(list)
		r[name+"p50_us"] = percentile(list, 50)
		r[name+"p99_us"] = percentile(list, 99)
		r[name+"max_us"] = percentile(list, 100)
	}
	return r
}

// failures turns the failed uses of many into the subcommand's error.
func failures(r result) error {
	if r["failed"] == 0 {
		return nil
	}
	return fmt.Errorf("%v of %v failed", r["failed"], r["count"])
}
