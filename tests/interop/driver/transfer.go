package main

import (
	"bufio"
	"context"
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"flag"
	"fmt"
	"io"
	"net"
	"net/http"
	"strings"
	"time"
)

// open dials with the flags of one subcommand.
func open(fs *flag.FlagSet, args []string) (*frontEnd, net.Conn, result, error) {
	f, err := newFrontEnd(fs, args)
	if err != nil {
		return nil, nil, nil, err
	}
	r := result{"front": f.kind}
	start := time.Now()
	conn, err := f.dial(context.Background())
	r["dial_ms"] = millis(start)
	if err != nil {
		describe(r, err)
		return nil, nil, r, fmt.Errorf("dial: %w", err)
	}
	return f, conn, r, nil
}

// finishTransfer closes the connection and adds the figures of a bulk transfer.
func finishTransfer(r result, conn net.Conn, bytes int64, start time.Time) {
	took := time.Since(start)
	r["bytes"] = bytes
	r["elapsed_ms"] = float64(took.Microseconds()) / 1000
	r["mib_per_s"] = float64(bytes) / (1 << 20) / took.Seconds()
	timedClose(r, conn)
}

// timedClose closes conn and reports how long that took and what it said.
func timedClose(r result, conn net.Conn) {
	closing := time.Now()
	if err := conn.Close(); err != nil {
		r["close_error"] = err.Error()
	}
	r["close_ms"] = millis(closing)
}

func runDownload(args []string) (result, error) {
	fs := flag.NewFlagSet("download", flag.ContinueOnError)
	want := fs.Int64("bytes", 1<<20, "bytes to fetch")
	_, conn, r, err := open(fs, args)
	if err != nil {
		return r, err
	}
	start := time.Now()
	if _, err := fmt.Fprintf(conn, "download %d\n", *want); err != nil {
		return r, err
	}
	got, sum, err := readAllSum(conn)
	finishTransfer(r, conn, got, start)
	r["sha256"] = sum
	switch {
	case err != nil:
		return r, fmt.Errorf("read failed after %d bytes: %w", got, err)
	case got != *want:
		return r, fmt.Errorf("got %d bytes, want %d", got, *want)
	case sum != streamSum(*want):
		return r, errors.New("the bytes differ from the stream")
	}
	return r, nil
}

func runUpload(args []string) (result, error) {
	fs := flag.NewFlagSet("upload", flag.ContinueOnError)
	n := fs.Int64("bytes", 1<<20, "bytes to send")
	// A TLS record is what an API server writes at most in one go.
	size := fs.Int("chunk", 16<<10, "bytes per write")
	_, conn, r, err := open(fs, args)
	if err != nil {
		return r, err
	}
	start := time.Now()
	if _, err := fmt.Fprintf(conn, "upload %d\n", *n); err != nil {
		return r, err
	}
	if err := writeStream(conn, *n, max(*size, 1)); err != nil {
		return r, err
	}
	line, err := bufio.NewReader(conn).ReadString('\n')
	finishTransfer(r, conn, *n, start)
	r["sha256"] = strings.TrimSpace(line)
	if err != nil {
		return r, fmt.Errorf("reading the digest: %w", err)
	}
	if r["sha256"] != streamSum(*n) {
		return r, errors.New("the service got other bytes than were sent")
	}
	return r, nil
}

// runHalf ends its own direction and expects the answer to still come: the
// service counts bytes until the end and answers with the count.
func runHalf(args []string) (result, error) {
	fs := flag.NewFlagSet("half", flag.ContinueOnError)
	n := fs.Int64("bytes", 1<<10, "bytes to send before the half close")
	_, conn, r, err := open(fs, args)
	if err != nil {
		return r, err
	}
	start := time.Now()
	if err := writeStream(conn, *n, chunk); err != nil {
		return r, err
	}
	if err := closeWrite(conn); err != nil {
		conn.Close()
		return r, err
	}
	answer, err := io.ReadAll(io.LimitReader(conn, 64))
	finishTransfer(r, conn, *n, start)
	r["answer"] = string(answer)
	if err != nil {
		return r, fmt.Errorf("reading the answer: %w", err)
	}
	if got, want := strings.TrimSpace(string(answer)), fmt.Sprint(*n); got != want {
		return r, fmt.Errorf("answer is %q, want %q", got, want)
	}
	return r, nil
}

func runHTTP(args []string) (result, error) {
	fs := flag.NewFlagSet("http", flag.ContinueOnError)
	path := fs.String("url-path", "/", "path to get")
	f, err := newFrontEnd(fs, args)
	if err != nil {
		return nil, err
	}
	r := result{"front": f.kind}
	dial := func(ctx context.Context, _, _ string) (net.Conn, error) { return f.dial(ctx) }
	web := &http.Client{Transport: &http.Transport{DialContext: dial, DisableKeepAlives: true}}
	start := time.Now()
	res, err := web.Get("http://" + f.target + *path)
	if err != nil {
		describe(r, err)
		return r, err
	}
	defer res.Body.Close()
	h := sha256.New()
	head := &strings.Builder{}
	n, err := io.Copy(h, io.TeeReader(res.Body, &limitedWriter{head, 1 << 10}))
	r["status"] = res.StatusCode
	r["bytes"] = n
	r["sha256"] = hex.EncodeToString(h.Sum(nil))
	r["body"] = head.String()
	r["elapsed_ms"] = millis(start)
	if err == nil && res.StatusCode != http.StatusOK {
		err = fmt.Errorf("status %s", res.Status)
	}
	return r, err
}

// limitedWriter keeps the first left bytes and drops the rest.
type limitedWriter struct {
	w    io.Writer
	left int
}

func (l *limitedWriter) Write(b []byte) (int, error) {
	n := min(l.left, len(b))
	l.left -= n
	if _, err := l.w.Write(b[:n]); err != nil {
		return 0, err
	}
	return len(b), nil
}
